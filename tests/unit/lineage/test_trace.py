"""From a digest or a name back to the raw files."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.run import RunRecord
from tasks.kernel.errors import ArtifactError
from tasks.kernel.settings import ArtifactStore
from tasks.lineage.journal import Journal
from tasks.lineage.steps import Node, Step
from tasks.lineage.trace import format_chain, trace
from tests.support.reporting.examples import COMMIT, PARENT, STARTED, linked_record, steps_of


def write(journal: Journal, steps: list[Step]) -> None:
    journal.record_steps(steps, PARENT, STARTED, COMMIT)


@pytest.fixture
def record(store: ArtifactStore) -> RunRecord:
    return linked_record(store)


@pytest.fixture
def filled(record: RunRecord, journal: Journal) -> Journal:
    write(journal, steps_of(record))
    return journal


def test_a_variant_leads_back_to_every_raw_file(record: RunRecord, filled: Journal) -> None:
    files = record.variants[0].files
    chain = trace(files.sha256[:10], filled)
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


def test_a_thing_is_found_by_its_name_or_the_end_of_it_and_nothing_else_is(filled: Journal) -> None:
    for name in ("flight-delay/3/onnx-fp32", "models/flight-delay/3"):
        assert trace(name, filled).start.name.endswith(name)
    for unknown in ("feedbeef", "models/another/1", "", "abc"):
        with pytest.raises(ArtifactError, match="0 things"):
            trace(unknown, filled)


def test_an_ambiguous_beginning_is_refused_and_a_name_means_its_newest_version(
    journal: Journal,
) -> None:
    write(journal, [Step(f"j{n}", (), (Node(f"d{n}", f"abcdef{n}"),), "") for n in range(2)])
    with pytest.raises(ArtifactError, match="d0 @ abcdef0, d1 @ abcdef1"):
        trace("abcdef", journal)
    assert trace("abcdef1", journal).start.name == "d1"
    write(journal, [Step("j", (), (Node("raw/a", v),), "") for v in ("b" * 8, "a" * 8)])
    assert trace("raw/a", journal).start.version == "a" * 8


@pytest.mark.parametrize(
    "strange",
    [{"outputs": [{}]}, {"job": None}, {"job": {"name": "j"}, "inputs": [{"name": "raw/a"}]}],
)
def test_an_event_of_another_shape_is_passed_over_and_counted(
    journal: Journal, strange: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(journal, [Step("j", (), (Node("raw/a", "a" * 8),), "")])
    journal.record([{"eventType": "COMPLETE", **strange}])
    assert trace("raw/a", journal).start.version == "a" * 8
    assert "1 event(s) were passed over" in caplog.text


def test_a_year_of_daily_refreshes_are_one_line_and_no_recursion(journal: Journal) -> None:
    def raw(day: int) -> Node:
        return Node("raw/a", f"{day:064x}")

    write(journal, [
        Step(f"merge{day}", (Node("landed/a", f"{day:063x}f"), *([raw(day - 1)] if day else [])),
             (raw(day),), "")
        for day in range(300)
    ])  # fmt: skip
    chain = trace(raw(299).version, journal)
    lines = format_chain(chain)
    assert "after 299 earlier version(s) of raw/a" in "\n".join(lines)
    assert len(lines) < 10
    assert len(chain.sources()) == 300


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_any_graph_ends_even_one_with_circles(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]]
) -> None:
    journal = Journal(tmp_path_factory.mktemp("graph"))
    write(journal, [
        Step(f"{a}-{b}", (Node(f"n{a}", f"{a:08x}"),), (Node(f"n{b}", f"{b:08x}"),), "")
        for a, b in [*edges, (0, 1)]
    ])  # fmt: skip
    chain = trace("n1", journal)
    seen = [origin.data for origin in chain]
    assert len(seen) == len(set(seen)) <= 7
    assert format_chain(chain)
