"""Events are OpenLineage, name what they should, and bear ids that depend on content alone."""

import json
import uuid
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from openlineage.client.event_v2 import RunState

from tasks.kernel.settings import ArtifactStore
from tasks.lineage.events import flow_event, run_id, step_events
from tasks.lineage.steps import Node, Step, conversion_steps, queries_with_reads, refresh_steps
from tests.support.reporting.examples import (
    COMMIT,
    PARENT,
    QUERIES,
    STARTED,
    linked_record,
    steps_of,
)


@pytest.fixture
def events(store: ArtifactStore) -> list[dict[str, Any]]:
    steps = steps_of(linked_record(store))
    return [e for step in steps for e in step_events(step, PARENT, STARTED, "flights", COMMIT)]


def check_event(event: dict[str, Any]) -> None:
    """The rules of OpenLineage 2-0-2 for a run event, and that every facet says what it is."""
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert event["schemaURL"].endswith("OpenLineage.json#/$defs/RunEvent")
    uuid.UUID(event["run"]["runId"])
    datasets = [*event.get("inputs", []), *event.get("outputs", [])]
    assert all(named["namespace"] and named["name"] for named in (event["job"], *datasets))
    for part in (event["run"], event["job"], *datasets):
        for kind in ("facets", "inputFacets", "outputFacets"):
            for facet in part.get(kind, {}).values():
                assert facet["_producer"]
                assert facet["_schemaURL"].startswith("https://openlineage.io/spec/facets/")


def test_every_event_of_a_run_is_openlineage(events: list[dict[str, Any]]) -> None:
    for event in events:
        check_event(event)
        assert json.loads(json.dumps(event, allow_nan=False)) == event
    runs = [Counter(e["run"]["runId"] for e in events if e["eventType"] == change)
            for change in ("START", "COMPLETE")]  # fmt: skip
    assert runs[0] == runs[1]


def test_the_chain_has_a_step_for_each_thing_that_was_made(store: ArtifactStore) -> None:
    steps = steps_of(linked_record(store))
    assert Counter(step.job.split(".")[0] for step in steps) == {
        "land": 3, "merge": 3, "compute": 4, "feature-view": 8, "snapshot": 1, "train": 1,
        "judge": 1, "convert": 3,
    }  # fmt: skip
    views = [s for s in steps if s.job.startswith("feature-view.")]
    assert len({run_id(step) for step in views}) == 4, "refresh and training name the same runs"


def test_a_run_id_depends_on_what_was_read_and_made_and_on_nothing_else() -> None:
    step = Step("job", (Node("a", "1"),), (Node("b", "2"),), "words")
    same = Step("job", (Node("a", "1", note="x", num_rows=3),), (Node("b", "2"),), "other words")
    assert run_id(step) == run_id(same)
    others = [
        Step("another", step.inputs, step.outputs, ""),
        Step("job", (Node("a", "9"),), step.outputs, ""),
        Step("job", (Node("a", "1", namespace="file"),), step.outputs, ""),
        Step("job", (), (*step.inputs, *step.outputs), ""),
    ]
    assert len({run_id(s) for s in [step, *others]}) == 5


def test_a_step_names_its_sql_commit_rows_and_validation(events: list[dict[str, Any]]) -> None:
    done = {e["job"]["name"]: e for e in events if e["eventType"] == "COMPLETE"}
    compute = done["compute.carrier_stats"]
    assert compute["job"]["facets"]["sql"]["query"] == QUERIES["carrier_stats"].text
    assert compute["job"]["facets"]["sourceCodeLocation"]["version"] == COMMIT
    assert [d["name"] for d in compute["inputs"]] == ["raw/flights"]
    (made,), (read,) = compute["outputs"], done["feature-view.carrier_stats"]["inputs"]
    assert made["outputFacets"]["outputStatistics"]["rowCount"] == 118_204
    assert read["facets"]["version"] == made["facets"]["version"]
    quality = done["merge.flights"]["inputs"][0]["inputFacets"]["dataQualityAssertions"]
    assert quality["assertions"][0]["description"].endswith("expectations on 336776 rows")
    parent = compute["run"]["facets"]["parent"]
    assert parent["job"]["name"] == "flow.training"
    assert parent["root"]["job"]["name"] == "flow.pipeline"


def test_a_dropped_variant_is_noted_as_such_and_one_without_files_is_not_data(
    store: ArtifactStore,
) -> None:
    record = linked_record(store)
    steps = list(conversion_steps(record.version, record.dataset, record.variants))
    notes = {step.outputs[0].name.rsplit("/", 1)[-1]: step.outputs[0].note for step in steps}
    assert notes == {"onnx-fp32": "kept", "openvino-fp32": "kept", "openvino-int8": "dropped"}


def test_a_table_that_a_refresh_left_as_it_was_does_not_follow_itself(store: ArtifactStore) -> None:
    refresh = linked_record(store).refresh
    raw = {ref.name: ref.artifact.sha256 for ref in refresh.tables.raw}
    follows = {**raw, "flights": "0" * 64}
    tables = refresh.tables.model_copy(update={"follows": follows})
    again = refresh.model_copy(update={"tables": tables})
    merged = {s.job: s.inputs for s in refresh_steps(again, {}) if s.job.startswith("merge.")}
    assert [n.version for n in merged["merge.flights"]][1:] == ["0" * 64]
    assert len(merged["merge.weather"]) == 1


@pytest.mark.parametrize("message", [None, "x" * 10_000])
def test_a_failed_flow_run_carries_its_message(message: str | None) -> None:
    event = flow_event(PARENT, RunState.FAIL, "flights", moment=STARTED, message=message)
    check_event(event)
    assert event["run"]["runId"] == PARENT.run_id
    carried = event["run"]["facets"].get("errorMessage", {}).get("message")
    assert carried == (message[:2000] if message else None)
    assert event["run"]["facets"]["parent"]["job"]["name"] == "flow.pipeline"


def test_queries_name_the_raw_tables_that_they_read_through_staging() -> None:
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
