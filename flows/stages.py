"""Run the stages of the loop, each where its rule says; time them, and tell work from reuse.

Which process runs a flow run: noted as labels of the run, so that a lost one can be told.

Prefect keeps a process id without its host. These labels also name the host, its boot, the
namespace of process ids and the moment the process began, so that neither a restart, nor a
container, nor a reused id is mistaken for the run.

Every deployed flow notes it. A run that was cut off is started again, unless its flow says here
that this would do something twice.

What each run takes: metered by hooks of its flow, and written to the ledger. Others tell the
journal that it begins, and how it ended.

Which window a run works on: the one that it was given, or what its use case's clock says.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast, get_args

from prefect import Flow, get_client, runtime
from prefect.client.schemas.objects import FlowRun, State

from flows.config import PipelineConfig
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DataSplits
from tasks.contracts.hardware import CLASS_VARIABLE
from tasks.contracts.run import StageRoute, StageTime
from tasks.control.config import LeaseRequest, RoutingConfig, StageLease, StageName
from tasks.control.leases.task import leased
from tasks.control.recovery.task import NOT_RETRIED, own_labels
from tasks.control.routing.task import StageOrder, as_returned, dump_parameters, run_stage
from tasks.costs.ledger import CostLedger
from tasks.costs.meter import RunMeter
from tasks.features.tables.ledger import load_ledger
from tasks.governance.handling import Placement, addresses
from tasks.governance.journal import Journal
from tasks.governance.policy import WORK, require_placements
from tasks.kernel.errors import WindowError
from tasks.kernel.process import report_progress
from tasks.kernel.settings import ArtifactStore, Settings, named_artifacts
from tasks.lineage.task import RECORDED as TOLD
from tasks.training.telemetry.meters import DeviceMeter, ProcessorMeter

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Stages:
    """Runs the stages of one loop after each other and keeps what each took.

    A stage counts as reused when all that its result names was built before it began, whatever
    other loops build meanwhile; one that decides anew each time never does.

    Args:
        use_case: name of the use case.
        routing: where its stages run.
        store: the artifact store that all stages share.
    """

    DECIDES_ANEW = frozenset({"promotion"})

    def __init__(self, use_case: str, routing: RoutingConfig, store: ArtifactStore) -> None:
        self._use_case, self._routing, self._store = use_case, routing, store
        self._by_deployment = routing.mode == "deployments" or (
            routing.mode == "auto" and bool(runtime.deployment.id)
        )
        self.times: list[StageTime] = []

    def run(
        self,
        name: StageName,
        stage: Flow[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run one stage; its failure passes through."""
        earlier, started = self._store.num_builds, time.monotonic()
        number, total = len(self.times), len(get_args(StageName))
        report_progress("stages", number, total, f"stage {number + 1} of {total}: {name}")
        if self._by_deployment:
            told, route = self._on_pool(name, stage, *args, **kwargs)
            result = cast(Result, told)
        else:
            result, route = called(stage, *args, **kwargs), self._here(name)
        seconds = round(time.monotonic() - started, 2)
        is_new = self._store.built_since(earlier)
        built = any(is_new(artifact) for artifact in named_artifacts(result))
        reused = not built and name not in self.DECIDES_ANEW
        self.times.append(StageTime(stage=name, seconds=seconds, reused=reused, route=route))
        return result

    def _on_pool(
        self, name: StageName, stage: Flow[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, StageRoute]:
        order = StageOrder(
            stage=name,
            flow_name=stage.name,
            parameters=dump_parameters(stage, *args, **kwargs),
            routing=self._routing,
            use_case=self._use_case,
            suffix=_suffix(self._use_case),
        )
        outcome = run_stage(order)
        return as_returned(outcome["result"], stage), StageRoute.model_validate(outcome["route"])

    def _here(self, name: StageName) -> StageRoute:
        forced = self._routing.mode == "in process"
        return StageRoute(
            wanted=self._routing.of(name).hardware_class,
            taken="this process",
            rule="in process",
            reason="routing.mode says so" if forced else "no deployment started this loop",
        )


def called(
    flow: Flow[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Run a flow within another; of one that has ended, a retry is given the stored plain JSON."""
    return cast(Result, as_returned(flow(*args, **kwargs), flow))


def _suffix(use_case: str) -> str:
    """What the loop's own deployment has after the flow's name: `-<use case>`; or nothing."""
    suffix = f"-{use_case}"
    return suffix if str(runtime.deployment.name or "").endswith(suffix) else ""


def note_process(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: write down the process that runs a flow run; its parent's for a flow that it calls."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, own_labels())


@cache
def run_meter() -> RunMeter:
    """The meter of this process's runs; it writes to the metadata database of the environment."""
    return RunMeter(
        lambda: CostLedger(Settings.from_environment().metadata_url), ProcessorMeter().joules
    )


def meter_begins(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: what is taken from now on counts to this run, without the runs that begin within it."""
    given = flow_run.parameters
    config = given.get("config") or {}
    model = config.get("registry", {}).get("model_name") or given.get("model") or ""
    root = flow_run.id
    if flow_run.parent_task_run_id is not None:
        root = runtime.flow_run.root_flow_run_id or root
    run_meter().begin(str(flow_run.id), flow.name, str(root), config.get("name") or "", model)


def meter_ends(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: the run has ended."""
    run_meter().end(str(flow_run.id), state.type.value.lower())


@contextmanager
def devices(request: LeaseRequest, policy: StageLease) -> Iterator[None]:
    """Hold devices as `leased` does; GPUs are metered as long as they are held."""
    with leased(request, policy) as lease:
        num_gpus = request.gpus if lease is None else len(lease.grant.gpus)
        meter = DeviceMeter(os.environ.get("CUDA_VISIBLE_DEVICES")) if num_gpus else None

        def joules() -> float | None:
            assert meter is not None
            meter.sample()
            found = [device.energy_j for device in meter.summaries()]
            return None if not found or None in found else sum(filter(None, found))

        try:
            with run_meter().holding(num_gpus, joules):
                yield
        finally:
            if meter is not None:
                meter.close()


def record_run(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: say in the journal that a run begins, or how it ended."""
    raised = re.search(r"exception: (\w+)", state.message or "")
    Journal(Settings.from_environment().home / "audit").append(
        "flow",
        outcome="begun" if state.is_running() else state.type.value.lower(),
        error=raised[1] if raised else None,
        subject={"flow": flow.name, "run": flow_run.name},
        use_case=(flow_run.parameters.get("config") or {}).get("name"),
        flow_run=str(flow_run.id),
    )


ENDS = ("on_completion", "on_failure", "on_crashed", "on_cancellation")
STORED: dict[str, Any] = {"persist_result": True, "result_serializer": "json"}
BEGINS, ENDED = [meter_begins, record_run], [meter_ends, record_run]
FOUND: dict[str, Any] = {
    **STORED,
    "on_running": [*BEGINS, note_process],
    **dict.fromkeys(ENDS, ENDED),
}
"""What a flow's decorator takes: its result is kept, its run is found when it is lost, what it
takes is metered, and the journal says when it began and how it ended."""

RECORDED: dict[str, Any] = {
    **FOUND,
    "on_running": [*FOUND["on_running"], *TOLD["on_running"]],
    **{end: [*TOLD[end], *ENDED] for end in ENDS},
}
"""The same for a flow that is part of the lineage."""


def found_but_not_retried(why: str) -> dict[str, Any]:
    """As `FOUND`, for a flow that must not be started again by itself."""

    def note_why(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(flow_run.id, {NOT_RETRIED: why})

    return {**FOUND, "on_running": [*BEGINS, note_why, note_process]}


def check_places(config: PipelineConfig, *also: Placement) -> None:
    """See that all of a use case may be where its configuration and this environment put it.

    Raises:
        PlacementRefusedError: it may not; nothing was read or written.
    """
    asked = [*addresses(config, os.environ), *also]
    if pool := os.environ.get(CLASS_VARIABLE):
        asked.append(Placement(WORK, f"pool:{pool}", CLASS_VARIABLE))
    require_placements(Settings.from_environment(), asked, [config.features.handling])


def moment_of_run() -> datetime:
    """When the run of this process was to start: the same at each retry, however late it is."""
    moment = runtime.flow_run.scheduled_start_time
    if not isinstance(moment, datetime):
        return datetime.now(UTC)
    # Prefect's own kind of moment loses its zone when hours are added to it.
    return datetime.fromtimestamp(moment.timestamp(), UTC)


def hours_or_newest(window: TimeWindow | None, config: PipelineConfig) -> TimeWindow:
    """The window that was asked for; where none was, the newest complete hours.

    Before anything is online, all hours since the use case's beginning: features of a few hours
    without their past are not like any of the baseline.
    """
    if window is not None:
        return window
    newest = config.clock.newest_hours(moment_of_run())
    if load_ledger(Settings.from_environment().features_home) is not None:
        return newest
    return TimeWindow(start=min(config.window.start, newest.start), end=newest.end)


def days_or_newest(window: TimeWindow | None, config: PipelineConfig) -> TimeWindow:
    """The window that was asked for; where none was, the newest complete days."""
    return window or config.clock.newest_days(moment_of_run())


def run_name(
    kind: str, chosen: Callable[[TimeWindow | None, PipelineConfig], TimeWindow] = days_or_newest
) -> Callable[[], str]:
    """Gives the name of a run on a window: kind, use case and window.

    Prefect asks for the name inside the run, when its parameters have been validated.
    """

    def name() -> str:
        parameters: dict[str, Any] = runtime.flow_run.parameters
        config = parameters["config"]
        return f"{kind}-{config.name}-{chosen(parameters['window'], config).slug}"

    return name


def held_back(config: PipelineConfig) -> timedelta:
    """Newest days that a rolled training judges by and does not learn from."""
    return timedelta(days=config.clock.validation_days + config.clock.test_days)


def roll(config: PipelineConfig, moment: datetime) -> PipelineConfig:
    """The use case with its windows moved to the newest complete day; all else is unchanged.

    Training begins where it always did and grows; validation and test are the newest days.

    Raises:
        WindowError: too few days for training lie before them.
    """
    clock = config.clock
    end = clock.day(moment)
    test = clock.day(moment, before=clock.test_days)
    validation = clock.day(moment, before=clock.test_days + clock.validation_days)
    start = config.splits.train.start
    if validation - start < timedelta(days=clock.min_train_days):
        raise WindowError(
            f"{config.name}: between {start:%Y-%m-%d} and {validation:%Y-%m-%d} lie fewer than "
            f"{clock.min_train_days} days to train on; expected at least that many before "
            f"{clock.validation_days} days of validation and {clock.test_days} of test that end at "
            f"{end:%Y-%m-%d}. Wait for more data, or shorten them under `clock`. Nothing was run"
        )
    return config.model_copy(
        update={
            "window": TimeWindow(start=config.window.start, end=end),
            "splits": DataSplits.between(start, validation, test, end),
            "current": clock.newest_days(moment),
        }
    )
