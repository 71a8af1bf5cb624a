"""Events are OpenLineage, name what they should, and bear ids that depend on content alone."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from openlineage.client.event_v2 import RunState

from tasks.kernel.settings import ArtifactStore
from tasks.lineage.config import LineageSettings
from tasks.lineage.events import flow_event, run_id
from tasks.lineage.steps import Node, Step, conversion_steps, refresh_steps, version_steps
from tests.support.reporting.examples import (
    COMMIT,
    PARENT,
    QUERIES,
    STARTED,
    events_of,
    linked_record,
    steps_of,
)

FACETS = {
    "run": {"parent", "errorMessage"},
    "job": {"jobType", "documentation", "sourceCodeLocation", "sql", "ownership"},
    "dataset": {"version", "schema", "falajNote", "ownership"},
    "input": {"dataQualityAssertions"},
    "output": {"outputStatistics"},
}


def check_event(event: dict[str, Any]) -> None:
    """The rules of OpenLineage 2-0-2 for a run event, and that every facet says what it is."""
    assert {"eventTime", "producer", "schemaURL", "run", "job"} <= event.keys()
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert event["schemaURL"].endswith("OpenLineage.json#/$defs/RunEvent")
    assert event["eventType"] in {"START", "COMPLETE", "FAIL", "ABORT"}
    uuid.UUID(event["run"]["runId"])
    check_facets(event["run"].get("facets", {}), FACETS["run"])
    assert event["job"]["namespace"]
    assert event["job"]["name"]
    check_facets(event["job"].get("facets", {}), FACETS["job"])
    for side, kind in (("inputs", "input"), ("outputs", "output")):
        for dataset in event.get(side, []):
            assert dataset["namespace"]
            assert dataset["name"]
            check_facets(dataset.get("facets", {}), FACETS["dataset"])
            check_facets(dataset.get(f"{kind}Facets", {}), FACETS[kind])


def check_facets(facets: dict[str, Any], allowed: set[str]) -> None:
    assert facets.keys() <= allowed
    for facet in facets.values():
        assert facet["_producer"].startswith("urn:falaj:") or "OpenLineage" in facet["_producer"]
        assert re.match(r"(https://openlineage\.io/spec/facets/|urn:falaj:)", facet["_schemaURL"])


def test_every_event_of_a_run_is_openlineage(
    store: ArtifactStore, settings: LineageSettings
) -> None:
    events = events_of(steps_of(linked_record(store)), settings, store)
    for event in events:
        check_event(event)
        assert json.loads(json.dumps(event, allow_nan=False)) == event
    started = Counter(e["run"]["runId"] for e in events if e["eventType"] == "START")
    completed = Counter(e["run"]["runId"] for e in events if e["eventType"] == "COMPLETE")
    assert started == completed


def test_the_chain_has_a_step_for_each_thing_that_was_made(store: ArtifactStore) -> None:
    jobs = Counter(step.job.split(".")[0] for step in steps_of(linked_record(store)))
    assert jobs == {
        "land": 3, "merge": 3, "compute": 4, "feature-view": 8, "snapshot": 1, "train": 1,
        "judge": 1, "convert": 3,
    }  # fmt: skip


def test_refresh_and_training_tell_of_the_same_view_under_the_same_run(
    store: ArtifactStore,
) -> None:
    views = [s for s in steps_of(linked_record(store)) if s.job.startswith("feature-view.")]
    assert len({run_id(step) for step in views}) == 4


def test_a_run_id_depends_on_what_was_read_and_made_and_on_nothing_else() -> None:
    step = Step("job", (Node("a", "1"),), (Node("b", "2"),), "told")
    same = Step("job", (Node("a", "1", note="x", num_rows=3),), (Node("b", "2"),), "other words")
    assert run_id(step) == run_id(same)
    others = [
        Step("another", step.inputs, step.outputs, ""),
        Step("job", (Node("a", "9"),), step.outputs, ""),
        Step("job", (Node("a", "1", namespace="file"),), step.outputs, ""),
        Step("job", (), (*step.inputs, *step.outputs), ""),
    ]
    assert len({run_id(s) for s in [step, *others]}) == 5


def test_a_step_says_its_sql_commit_owner_rows_columns_and_validation(
    store: ArtifactStore, settings: LineageSettings
) -> None:
    record = linked_record(store)
    events = events_of(steps_of(record), settings, store)
    done = {e["job"]["name"]: e for e in events if e["eventType"] == "COMPLETE"}
    compute = done["compute.carrier_stats"]
    assert compute["job"]["facets"]["sql"]["query"] == QUERIES["carrier_stats"].text
    assert compute["job"]["facets"]["sourceCodeLocation"]["version"] == COMMIT
    assert [d["name"] for d in compute["inputs"]] == ["raw/flights"]
    assert compute["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 118_204
    assert compute["outputs"][0]["facets"]["ownership"]["owners"][0]["name"] == "team:flights"
    (read,) = done["feature-view.carrier_stats"]["inputs"]
    assert read["facets"]["version"]["datasetVersion"] == compute["outputs"][0]["facets"][
        "version"
    ]["datasetVersion"]  # fmt: skip
    (assertion,) = done["merge.flights"]["inputs"][0]["inputFacets"]["dataQualityAssertions"][
        "assertions"
    ]
    assert assertion["success"] is True
    assert assertion["description"] == "19 expectations on 336776 rows"
    fields = done["train.flight-delay"]["outputs"][0]["facets"]["schema"]["fields"]
    assert [f["ordinal_position"] for f in fields] == list(range(1, len(fields) + 1))
    parent = compute["run"]["facets"]["parent"]
    assert parent["job"]["name"] == "flow.training"
    assert parent["root"]["job"]["name"] == "flow.pipeline"


def test_columns_come_from_the_files_where_they_are_tables(
    store: ArtifactStore, settings: LineageSettings
) -> None:
    events = events_of(steps_of(linked_record(store)), settings, store)
    judged = next(
        e for e in events if e["job"]["name"] == "judge.flight-delay" and e.get("outputs")
    )
    fields = judged["outputs"][0]["facets"]["schema"]["fields"]
    assert [(f["name"], f["type"]) for f in fields] == [("label", "int64"), ("score", "double")]


def test_a_dropped_variant_is_told_as_such_and_one_without_files_is_not_data(
    store: ArtifactStore,
) -> None:
    record = linked_record(store)
    steps = list(conversion_steps(record.version, record.dataset, record.variants))
    notes = {step.outputs[0].name.rsplit("/", 1)[-1]: step.outputs[0].note for step in steps}
    assert notes == {"onnx-fp32": "kept", "openvino-fp32": "kept", "openvino-int8": "dropped"}


def test_a_table_that_a_refresh_left_as_it_was_does_not_follow_itself(
    store: ArtifactStore,
) -> None:
    refresh = linked_record(store).refresh
    raw = {ref.name: ref.artifact.sha256 for ref in refresh.tables.raw}
    follows = {**raw, "flights": "0" * 64}
    tables = refresh.tables.model_copy(update={"follows": follows})
    again = refresh.model_copy(update={"tables": tables})
    merged = {s.job: s.inputs for s in refresh_steps(again, {}) if s.job.startswith("merge.")}
    assert [n.version for n in merged["merge.flights"]][1:] == ["0" * 64]
    assert len(merged["merge.weather"]) == 1


def test_records_of_earlier_releases_give_the_steps_that_they_can(store: ArtifactStore) -> None:
    record = linked_record(store)
    snapshot = record.dataset.snapshot.model_copy(update={"pins": None})
    dataset = record.dataset.model_copy(update={"snapshot": snapshot})
    steps = version_steps(record.version, record.model, dataset, record.evaluation, None)
    jobs = [step.job for step in steps]
    assert jobs == ["train.flight-delay", "judge.flight-delay"]


@pytest.mark.parametrize("message", [None, "2 rows were lost", "x" * 10_000])
def test_a_failed_flow_run_tells_its_sentence(
    settings: LineageSettings, message: str | None
) -> None:
    event = flow_event(PARENT, RunState.FAIL, settings, moment=STARTED, message=message)
    check_event(event)
    assert event["run"]["runId"] == PARENT.run_id
    told = event["run"]["facets"].get("errorMessage", {}).get("message")
    assert told == (message[:2000] if message else None)
    assert event["run"]["facets"]["parent"]["job"]["name"] == "flow.pipeline"
