"""Lineage in flows: one task at the end of a flow for its steps, hooks for the flow run itself.

A lineage failure never fails a run: flows call the task with `return_state=True`, so its failure
shows in the Prefect UI and in the log and goes no further, and Prefect logs what a hook raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import get_client, runtime, task

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ImportedProgram, PreparedRows
from tasks.contracts.data import FeatureRefresh, ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant
from tasks.contracts.training import CandidateModel
from tasks.kernel.errors import ArtifactError
from tasks.kernel.retry_policy import uncached

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun as PrefectFlowRun
    from prefect.client.schemas.objects import State

    from tasks.lineage.events import FlowRun
    from tasks.lineage.steps import Step


# Not cached: what was recorded already is found in the lineage files, step by step.
_POLICY = uncached(120)


@task(name="record-refresh-lineage", task_run_name="lineage-{refresh.window.slug}", **_POLICY)
def record_refresh(
    refresh: FeatureRefresh, queries: Mapping[str, str], staging: Mapping[str, str], commit: str
) -> int:
    """Record where the feature tables came from; returns the number of steps that were new.

    Safe to retry: a step is written once.

    Args:
        refresh: what the flow returns.
        queries: SQL of each feature table, by the table's name.
        staging: SQL of each staging table, by the table's name.
        commit: of the code.
    """
    from tasks.lineage.steps import queries_with_reads, refresh_steps

    raw = frozenset(ref.name for ref in refresh.tables.raw)
    found = queries_with_reads(queries, staging, raw)
    return _record(list(refresh_steps(refresh, found)), commit)


@task(
    name="record-version-lineage",
    task_run_name="lineage-{version.name}-v{version.version}",
    **_POLICY,
)
def record_version(
    version: ModelVersionRef,
    model: CandidateModel,
    dataset: ValidatedDataset,
    evaluation: EvaluationReport,
    entities: str,
    staging: Mapping[str, str],
    commit: str,
) -> int:
    """Record where a trained, recalibrated or smaller version came from.

    Safe to retry: a step is written once.

    Args:
        version: what was registered.
        model: the same, as it was judged.
        dataset: rows of the training, or of the fit, and of the judgement.
        evaluation: the judgement.
        entities: SQL of the entity frame.
        staging: SQL of each staging table, by the table's name.
        commit: of the code.

    Returns:
        The number of steps that were new.
    """
    from tasks.lineage.steps import queries_with_reads, version_steps

    pins = dataset.snapshot.pins
    raw = frozenset(t.name for t in pins.tables if t.group == "raw") if pins else frozenset()
    found = queries_with_reads({"entities": entities}, staging, raw)
    steps = version_steps(version, model, dataset, evaluation, found["entities"])
    return _record(list(steps), commit)


@task(
    name="record-conversion-lineage",
    task_run_name="lineage-{version.name}-v{version.version}-variants",
    **_POLICY,
)
def record_conversion(
    version: ModelVersionRef,
    rows: ValidatedDataset | PreparedRows,
    variants: tuple[ModelVariant, ...],
    commit: str,
) -> int:
    """Record where the variants came from; returns the number of steps that were new.

    Safe to retry: a step is written once.
    """
    from tasks.lineage.steps import conversion_steps

    return _record(list(conversion_steps(version, rows, variants)), commit)


@task(
    name="record-import-lineage",
    task_run_name="lineage-{version.name}-v{version.version}-import",
    **_POLICY,
)
def record_import(version: ModelVersionRef, imported: ImportedProgram, commit: str) -> int:
    """Record where an imported model came from; returns the number of steps that were new.

    Safe to retry: a step is written once.
    """
    from tasks.lineage.steps import import_steps

    return _record(list(import_steps(version, imported)), commit)


@task(name="find-raw-files", task_run_name="raw-files-{version.name}-v{version.version}", **_POLICY)
def find_raw_files(version: ModelVersionRef) -> dict[str, str]:
    """SHA-256 of each raw file behind a version to its name; empty where none is recorded.

    Safe to retry: it only reads.
    """
    from tasks.lineage.journal import Journal, LineageSettings
    from tasks.lineage.trace import address, trace

    journal = Journal(LineageSettings.from_environment())
    try:
        chain = trace(f"models/{version.name}/{version.version}", journal)
        return {data.version: address(data) for data in chain.sources()}
    except ArtifactError:  # its lineage failed, which fails no run; the bill says so
        return {}


def _record(steps: list[Step], commit: str) -> int:
    from tasks.lineage.journal import Journal, LineageSettings

    journal = Journal(LineageSettings.from_environment())
    started = runtime.flow_run.scheduled_start_time or datetime.now(UTC)
    return journal.record_steps(steps, _current_flow(), started, commit)


def _current_flow() -> FlowRun:
    from tasks.lineage.events import FlowRun

    own, top = str(runtime.flow_run.id), str(runtime.flow_run.root_flow_run_id)
    name = str(runtime.flow_run.flow_name)
    if top == own:
        return FlowRun(own, name)
    with get_client(sync_client=True) as client:
        first = client.read_flow(client.read_flow_run(UUID(top)).flow_id)
    return FlowRun(own, name, FlowRun(top, first.name))


def _hook(change: str) -> Callable[[Flow[..., Any], PrefectFlowRun, State[Any]], None]:
    """A hook that records one change of a flow run, with the message of a bad end."""

    def record_change(flow: Flow[..., Any], run: PrefectFlowRun, state: State[Any]) -> None:
        from openlineage.client.event_v2 import RunState

        from tasks.lineage.events import FlowRun, flow_event
        from tasks.lineage.journal import Journal, LineageSettings

        settings = LineageSettings.from_environment()
        event = flow_event(
            FlowRun(str(run.id), flow.name),
            RunState[change],
            settings.namespace,
            moment=datetime.now(UTC),
            message=state.message if change in ("FAIL", "ABORT") else None,
        )
        Journal(settings).record([event])

    return record_change


RECORDED: dict[str, Any] = {
    "on_running": [_hook("START")],
    "on_completion": [_hook("COMPLETE")],
    "on_failure": [_hook("FAIL")],
    "on_crashed": [_hook("FAIL")],
    "on_cancellation": [_hook("ABORT")],
}
"""What a flow's decorator takes to have its runs recorded: `@flow(..., **RECORDED)`."""
