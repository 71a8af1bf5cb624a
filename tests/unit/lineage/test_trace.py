"""From a digest or a name back to the raw files."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.run import RunRecord
from tasks.kernel.errors import ArtifactError
from tasks.kernel.settings import ArtifactStore
from tasks.lineage.config import LineageSettings
from tasks.lineage.journal import Journal, queries_with_reads
from tasks.lineage.record import record_events, record_steps
from tasks.lineage.steps import Node, Step
from tasks.lineage.trace import format_chain, trace
from tests.support.reporting.examples import COMMIT, PARENT, STARTED, linked_record, steps_of


@pytest.fixture
def record(store: ArtifactStore) -> RunRecord:
    return linked_record(store)


@pytest.fixture
def journal(record: RunRecord, settings: LineageSettings, store: ArtifactStore) -> Journal:
    record_steps(steps_of(record), PARENT, STARTED, settings, store, COMMIT)
    return Journal(settings.folder)


def test_a_variant_leads_back_to_every_raw_file(record: RunRecord, journal: Journal) -> None:
    files = record.variants[0].files
    assert files is not None
    chain = trace(files.sha256[:10], journal)
    assert {source.version for source in chain.sources()} == {
        t.source.sha256 for t in record.refresh.rows.landed.tables if t.source
    }
    names = [origin.data.name for origin in chain]
    for name in (
        "variants/flight-delay/3/onnx-fp32", "models/flight-delay/3",
        "snapshots/flight_delay_v1", "views/route_stats", "features/route_stats", "raw/flights",
        "landed/flights", "data/flights.csv.zip",
    ):  # fmt: skip
        assert name in names, name
    assert len(names) == len(set(names))
    assert {origin.commit for origin in chain if origin.inputs} == {COMMIT}


@pytest.mark.parametrize(
    "name",
    [
        "predictions/flight-delay/3",
        "flight-delay/3/onnx-fp32",
        "models/flight-delay/3",
        "snapshots/flight_delay_v1",
    ],
)
def test_a_thing_is_found_by_its_name_or_the_end_of_it(name: str, journal: Journal) -> None:
    assert trace(name, journal).start.name.endswith(name)


@pytest.mark.parametrize("name", ["feedbeef", "models/another/1", "", "abc"])
def test_an_unknown_name_is_refused_in_a_sentence(name: str, journal: Journal) -> None:
    with pytest.raises(ArtifactError, match="0 things are called so"):
        trace(name, journal)


def test_the_chain_reads_as_a_tree(journal: Journal) -> None:
    lines = format_chain(trace("snapshots/flight_delay_v1", journal))
    assert lines[0].startswith("snapshots/flight_delay_v1 @ ")
    assert lines[0].endswith("(version 2)  by snapshot.flight_delay_v1")
    assert any(line.startswith("├─ views/carrier_stats") for line in lines)
    assert any("v1, definition c3c3c3c3c3c3" in line for line in lines)
    assert sum("as above" in line for line in lines) > 0
    assert sum("data/flights.csv.zip" in line for line in lines) == 1


def test_an_ambiguous_beginning_is_refused_with_what_it_could_be(
    settings: LineageSettings, store: ArtifactStore
) -> None:
    steps = [Step(f"j{n}", (), (Node(f"d{n}", f"abcdef{n}"),), "") for n in range(2)]
    record_steps(steps, PARENT, STARTED, settings, store, COMMIT)
    with pytest.raises(ArtifactError, match="d0 @ abcdef0, d1 @ abcdef1"):
        trace("abcdef", Journal(settings.folder))
    assert trace("abcdef1", Journal(settings.folder)).start.name == "d1"


def test_a_name_of_several_versions_means_the_newest(
    settings: LineageSettings, store: ArtifactStore
) -> None:
    steps = [Step("j", (), (Node("raw/a", version),), "") for version in ("b" * 8, "a" * 8)]
    record_steps(steps, PARENT, STARTED, settings, store, COMMIT)
    assert trace("raw/a", Journal(settings.folder)).start.version == "a" * 8


@pytest.mark.parametrize(
    "strange",
    [
        {"outputs": [{}]},
        {"outputs": None},
        {"job": None, "run": {"runId": "r"}},
        {"job": {"name": "j"}, "run": {"runId": "r"}, "inputs": [{"name": "raw/a"}]},
        {"job": {"name": "j", "facets": {"sql": 1}}, "run": {"runId": "r"}},
    ],
)
def test_an_event_of_another_shape_is_passed_over_and_counted(
    settings: LineageSettings,
    store: ArtifactStore,
    strange: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    record_steps([Step("j", (), (Node("raw/a", "a" * 8),), "")], PARENT, STARTED, settings, store,
                 COMMIT)  # fmt: skip
    record_events([{"eventType": "COMPLETE", **strange}], settings)
    with caplog.at_level(logging.WARNING):
        assert trace("raw/a", Journal(settings.folder)).start.version == "a" * 8
    assert "1 COMPLETE event(s) lack" in caplog.text


def test_three_years_of_daily_refreshes_are_one_line_and_no_recursion(
    settings: LineageSettings, store: ArtifactStore
) -> None:
    def raw(day: int) -> Node:
        return Node("raw/a", f"{day:064x}")

    steps = [
        Step(f"merge{day}", (Node("landed/a", f"{day:063x}f"), *([raw(day - 1)] if day else [])),
             (raw(day),), "")
        for day in range(1100)
    ]  # fmt: skip
    record_steps(steps, PARENT, STARTED, settings, store, COMMIT)
    chain = trace(raw(1099).version, Journal(settings.folder))
    lines = format_chain(chain)
    assert "after 1099 earlier version(s) of raw/a" in "\n".join(lines)
    assert len(lines) < 10
    assert len(chain.sources()) == 1100


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_any_graph_ends_even_one_with_circles(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("graph")
    steps = [
        Step(f"{a}-{b}", (Node(f"n{a}", f"{a:08x}"),), (Node(f"n{b}", f"{b:08x}"),), "")
        for a, b in [*edges, (0, 1)]
    ]
    at = LineageSettings(folder=folder)
    record_steps(steps, PARENT, STARTED, at, ArtifactStore(folder), COMMIT)
    chain = trace("n1", Journal(folder))
    seen = [origin.data for origin in chain]
    assert len(seen) == len(set(seen)) <= 7
    assert format_chain(chain)


def test_queries_say_which_raw_tables_they_read_through_staging() -> None:
    found = queries_with_reads(
        {
            "stats": "SELECT * FROM times WHERE now() > getvariable('window_start')",
            "plain": "WITH hours AS (SELECT 1) SELECT * FROM hours JOIN planes USING (id)",
            "broken": "SELECT FROM WHERE",
        },
        {"times": "SELECT * FROM more JOIN flights USING (id)", "more": "SELECT * FROM airports"},
        frozenset({"flights", "planes", "airports"}),
    )
    assert found["stats"].reads == ("airports", "flights")
    assert found["plain"].reads == ("planes",)
    assert found["broken"].reads == ("airports", "flights", "planes")
