"""Steps as OpenLineage events, through the attrs models of its client, which check each facet.

A step's run id is a digest of its job and of the versions of all that it read and made. The same
step, done or recorded again, is the same run; `tasks.lineage.journal` writes a run once.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from openlineage.client import event_v2 as ol
from openlineage.client import facet_v2 as facets
from openlineage.client.serde import Serde

from tasks.lineage.steps import Node, Step

PRODUCER = "urn:falaj:lineage:1"
RUNS = uuid.UUID("6f0c7ce2-0b0e-5c55-9d8c-6f1f2f7f3a11")
"""Name space of the run ids; never to be changed."""

MAX_MESSAGE = 2000


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
    step: Step, parent: FlowRun, started: datetime, namespace: str, commit: str
) -> tuple[dict[str, Any], ...]:
    """START and COMPLETE of one step, as JSON.

    Args:
        parent: the flow run that did it.
        started: when that flow run began; a step keeps no time of its own.
        commit: of the code.
    """
    run = ol.Run(runId=run_id(step), facets={"parent": _parent(parent, namespace)})
    job = _job(step, namespace, commit)
    return (
        _event(ol.RunState.START, started, run, job),
        _event(
            ol.RunState.COMPLETE,
            max(started, datetime.now(UTC)),
            run,
            job,
            inputs=[_input(node, namespace) for node in step.inputs],
            outputs=[_output(node, namespace) for node in step.outputs],
        ),
    )


def _event(
    state: ol.RunState, moment: datetime, run: ol.Run, job: ol.Job, **datasets: Any
) -> dict[str, Any]:
    event = ol.RunEvent(
        eventTime=moment.astimezone(UTC).isoformat(),
        eventType=state,
        run=run,
        job=job,
        producer=PRODUCER,
        **datasets,
    )
    return Serde.to_dict(event)


def flow_event(
    flow: FlowRun,
    state: ol.RunState,
    namespace: str,
    *,
    moment: datetime,
    message: str | None = None,
) -> dict[str, Any]:
    """One change of a flow run: it started, ended, or failed with a message."""
    run_facets: dict[str, facets.RunFacet] = {}
    if flow.root is not None:
        run_facets["parent"] = _parent(flow.root, namespace)
    if message:
        run_facets["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(
            message[:MAX_MESSAGE], "PYTHON"
        )
    kind = facets.job_type_job.JobTypeJobFacet("BATCH", "FALAJ", "FLOW")
    job = ol.Job(namespace, f"flow.{flow.name}", facets={"jobType": kind})
    return _event(state, moment, ol.Run(runId=flow.run_id, facets=run_facets), job)


def _parent(flow: FlowRun, namespace: str) -> facets.parent_run.ParentRunFacet:
    """The flow run that a run belongs to, and the one that started everything."""
    top = flow.root or flow
    parts = facets.parent_run
    return parts.ParentRunFacet(
        run=parts.Run(flow.run_id),
        job=parts.Job(namespace, f"flow.{flow.name}"),
        root=parts.Root(
            run=parts.RootRun(top.run_id), job=parts.RootJob(namespace, f"flow.{top.name}")
        ),
    )


def _job(step: Step, namespace: str, commit: str) -> ol.Job:
    # The repository's address is not known here; the commit says exactly which code it was.
    code = facets.source_code_location_job.SourceCodeLocationJobFacet(
        type="git", url=f"urn:git:commit:{commit}", version=commit
    )
    job_facets: dict[str, facets.JobFacet] = {
        "jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "FALAJ", "TASK"),
        "documentation": facets.documentation_job.DocumentationJobFacet(step.description),
        "sourceCodeLocation": code,
    }
    if step.sql:
        job_facets["sql"] = facets.sql_job.SQLJobFacet(step.sql, "duckdb")
    return ol.Job(namespace, step.job, facets=job_facets)


def _input(node: Node, namespace: str) -> ol.InputDataset:
    found: dict[str, facets.InputDatasetFacet] = {}
    if result := node.validation:
        quality = facets.data_quality_assertions_dataset
        assertion = quality.Assertion(
            assertion="expectation_suite",
            success=True,  # what fails its suite goes no further, so no step reads it
            name=result.suite,
            severity="error",
            description=f"{result.num_expectations} expectations on {result.num_rows} rows",
            params={"result": result.result.uri, "sha256": result.result.sha256},
        )
        found["dataQualityAssertions"] = quality.DataQualityAssertionsDatasetFacet([assertion])
    return ol.InputDataset(
        node.namespace or namespace, node.name, facets=_dataset_facets(node), inputFacets=found
    )


def _output(node: Node, namespace: str) -> ol.OutputDataset:
    found: dict[str, facets.OutputDatasetFacet] = {}
    if node.num_rows is not None or node.num_bytes is not None:
        size = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
        found["outputStatistics"] = size(rowCount=node.num_rows, size=node.num_bytes)
    return ol.OutputDataset(
        node.namespace or namespace, node.name, facets=_dataset_facets(node), outputFacets=found
    )


def _dataset_facets(node: Node) -> dict[str, facets.DatasetFacet]:
    found: dict[str, facets.DatasetFacet] = {
        "version": facets.dataset_version_dataset.DatasetVersionDatasetFacet(node.version)
    }
    if node.note:
        found["documentation"] = facets.documentation_dataset.DocumentationDatasetFacet(node.note)
    if node.uri:
        found["dataSource"] = facets.datasource_dataset.DatasourceDatasetFacet("artifact", node.uri)
    return found
