"""Steps as OpenLineage events, through the attrs models of its client, which check each facet.

A step's run id is a digest of its job and of the versions of all that it read and made. The same
step, done or recorded again, is the same run; `tasks.lineage.journal` writes a run once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attr
import pyarrow as pa
import pyarrow.parquet as pq
from openlineage.client import event_v2 as ol
from openlineage.client import facet_v2 as facets
from openlineage.client.serde import Serde

from tasks.kernel.errors import ArtifactError
from tasks.kernel.settings import ArtifactStore
from tasks.lineage.config import LineageSettings
from tasks.lineage.steps import Node, Step

PRODUCER = "urn:falaj:lineage:1"
RUNS = uuid.UUID("6f0c7ce2-0b0e-5c55-9d8c-6f1f2f7f3a11")
"""Name space of the run ids; never to be changed."""

MAX_MESSAGE = 2000


@attr.define
class NoteDatasetFacet(facets.DatasetFacet):
    """Our own facet: what a person calls this version."""

    note: str
    uri: str | None = None

    @staticmethod
    def _get_schema() -> str:
        return "urn:falaj:lineage:NoteDatasetFacet:1"


@dataclass(frozen=True)
class FlowRun:
    """The flow run that steps belong to; `root` is the one that started it, if any."""

    run_id: str
    name: str
    root: FlowRun | None = None


def run_id(step: Step) -> str:
    """UUID of the run that a step is."""
    sides = [
        [[node.namespace, node.name, node.version] for node in side]
        for side in (step.inputs, step.outputs)
    ]
    return str(uuid.uuid5(RUNS, json.dumps([step.job, *sides])))


def step_events(
    step: Step,
    parent: FlowRun,
    started: datetime,
    settings: LineageSettings,
    store: ArtifactStore,
    commit: str,
) -> tuple[dict[str, Any], ...]:
    """START and COMPLETE of one step, as JSON.

    Args:
        parent: the flow run that did it.
        started: when that flow run began; a step keeps no time of its own.
        store: where columns of tables are read; a file that is gone costs its columns only.
        commit: of the code.
    """
    run = ol.Run(runId=run_id(step), facets={"parent": parent_facet(parent, settings)})
    job = _job(step, settings, commit)
    begun = ol.RunEvent(
        eventTime=_time(started),
        eventType=ol.RunState.START,
        run=run,
        job=job,
        producer=PRODUCER,
    )
    done = ol.RunEvent(
        eventTime=_time(max(started, datetime.now(UTC))),
        eventType=ol.RunState.COMPLETE,
        run=run,
        job=job,
        inputs=[_input(node, settings, store) for node in step.inputs],
        outputs=[_output(node, settings, store) for node in step.outputs],
        producer=PRODUCER,
    )
    return Serde.to_dict(begun), Serde.to_dict(done)


def flow_event(
    flow: FlowRun,
    state: ol.RunState,
    settings: LineageSettings,
    *,
    moment: datetime,
    message: str | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """One change of a flow run: it started, ended, or failed with a message."""
    run_facets: dict[str, facets.RunFacet] = {}
    if flow.root is not None:
        run_facets["parent"] = parent_facet(flow.root, settings)
    if message:
        run_facets["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(
            message[:MAX_MESSAGE], "PYTHON"
        )
    kind = facets.job_type_job.JobTypeJobFacet("BATCH", "FALAJ", "FLOW")
    job_facets: dict[str, facets.JobFacet] = {"jobType": kind}
    if commit:
        job_facets["sourceCodeLocation"] = _code(commit)
    event = ol.RunEvent(
        eventTime=_time(moment),
        eventType=state,
        run=ol.Run(runId=flow.run_id, facets=run_facets),
        job=ol.Job(settings.namespace, flow_job(flow.name), facets=job_facets),
        producer=PRODUCER,
    )
    return Serde.to_dict(event)


def flow_job(name: str) -> str:
    """Job name of a flow."""
    return f"flow.{name}"


def parent_facet(flow: FlowRun, settings: LineageSettings) -> facets.parent_run.ParentRunFacet:
    """The flow run that a run belongs to, and the one that started everything."""
    top = flow.root or flow
    parts = facets.parent_run
    return parts.ParentRunFacet(
        run=parts.Run(flow.run_id),
        job=parts.Job(settings.namespace, flow_job(flow.name)),
        root=parts.Root(
            run=parts.RootRun(top.run_id),
            job=parts.RootJob(settings.namespace, flow_job(top.name)),
        ),
    )


def _job(step: Step, settings: LineageSettings, commit: str) -> ol.Job:
    job_facets: dict[str, facets.JobFacet] = {
        "jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "FALAJ", "TASK"),
        "documentation": facets.documentation_job.DocumentationJobFacet(step.description),
        "sourceCodeLocation": _code(commit),
    }
    if step.sql:
        job_facets["sql"] = facets.sql_job.SQLJobFacet(step.sql, "duckdb")
    if settings.owner:
        owner = facets.ownership_job.Owner(settings.owner)
        job_facets["ownership"] = facets.ownership_job.OwnershipJobFacet([owner])
    return ol.Job(settings.namespace, step.job, facets=job_facets)


def _code(commit: str) -> facets.source_code_location_job.SourceCodeLocationJobFacet:
    # The repository's address is not known here; the commit says exactly which code it was.
    return facets.source_code_location_job.SourceCodeLocationJobFacet(
        type="git", url=f"urn:git:commit:{commit}", version=commit
    )


def _input(node: Node, settings: LineageSettings, store: ArtifactStore) -> ol.InputDataset:
    found: dict[str, facets.InputDatasetFacet] = {}
    if node.validation is not None:
        result = node.validation
        assertion = facets.data_quality_assertions_dataset.Assertion(
            assertion="expectation_suite",
            success=True,  # what fails its suite goes no further, so no step reads it
            name=result.suite,
            severity="error",
            description=f"{result.num_expectations} expectations on {result.num_rows} rows",
            params={"result": result.result.uri, "sha256": result.result.sha256},
        )
        found["dataQualityAssertions"] = (
            facets.data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet([assertion])
        )
    return ol.InputDataset(
        node.namespace or settings.namespace,
        node.name,
        facets=_dataset_facets(node, settings, store),
        inputFacets=found,
    )


def _output(node: Node, settings: LineageSettings, store: ArtifactStore) -> ol.OutputDataset:
    statistics = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        rowCount=node.num_rows, size=node.num_bytes
    )
    known = node.num_rows is not None or node.num_bytes is not None
    return ol.OutputDataset(
        node.namespace or settings.namespace,
        node.name,
        facets=_dataset_facets(node, settings, store),
        outputFacets={"outputStatistics": statistics} if known else {},
    )


def _dataset_facets(
    node: Node, settings: LineageSettings, store: ArtifactStore
) -> dict[str, facets.DatasetFacet]:
    found: dict[str, facets.DatasetFacet] = {
        "version": facets.dataset_version_dataset.DatasetVersionDatasetFacet(node.version)
    }
    if columns := node.columns or _columns_of(node, store):
        fields = facets.schema_dataset.SchemaDatasetFacetFields
        found["schema"] = facets.schema_dataset.SchemaDatasetFacet(
            [fields(name, kind, ordinal_position=n) for n, (name, kind) in enumerate(columns, 1)]
        )
    if node.note or node.artifact:
        uri = node.artifact.uri if node.artifact else None
        found["falajNote"] = NoteDatasetFacet(node.note, uri)
    if settings.owner and node.namespace is None:
        owner = facets.ownership_dataset.Owner(settings.owner)
        found["ownership"] = facets.ownership_dataset.OwnershipDatasetFacet([owner])
    return found


def _columns_of(node: Node, store: ArtifactStore) -> tuple[tuple[str, str], ...]:
    """Columns of a Parquet table; none where it is no table, or is gone."""
    if node.artifact is None:
        return ()
    try:
        path = store.path(node.artifact, verify=False)
    except ArtifactError:
        return ()
    first = next(_parquet_files(path), None)
    if first is None:
        return ()
    try:
        schema = pq.read_schema(first)
    except pa.ArrowInvalid:  # a damaged file costs its columns only
        return ()
    return tuple((column.name, str(column.type)) for column in schema)


def _parquet_files(path: Path) -> Iterator[Path]:
    candidates: Iterable[Path] = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return (file for file in candidates if file.suffix == ".parquet")


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()
