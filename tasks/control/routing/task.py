"""Stages on work pools: choose the place by rule, start its deployment, wait, take the result.

The run that a stage was given to is found again by its idempotency key, made of the loop's run, the
stage and its parameters, and counted up after each run that gave nothing. So a loop that is retried
takes up the run that an earlier attempt of it started, and none is started twice.
"""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints
from uuid import UUID

import httpx
from anyio import to_thread
from prefect import Flow, runtime, task
from prefect._internal.compatibility.async_dispatch import async_dispatch
from prefect._internal.result_records import ResultRecordMetadata
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter, WorkQueueFilter
from prefect.client.schemas.objects import FlowRun, State, TaskRun, Worker
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import TaskRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError, TerminationSignal
from prefect.filesystems import LocalFileSystem, WritableFileSystem
from prefect.logging import get_run_logger
from prefect.results import get_default_result_storage, resolve_result_storage
from prefect.states import Cancelled, Cancelling
from prefect.tasks import Task
from prefect.utilities.urls import url_for
from pydantic import TypeAdapter, ValidationError

import tasks.kernel.errors
from tasks.contracts.hardware import CPU, FILE_NAME, kind_of
from tasks.contracts.run import StageRoute
from tasks.control.config import BurstRule, RoutingConfig, StageName, StageRouting
from tasks.governance.policy import refused_pool
from tasks.kernel.errors import FalajError, StageError, StageLostError
from tasks.kernel.location import Location
from tasks.kernel.retry_policy import KEPT, is_api_away
from tasks.kernel.settings import PROJECT_ROOT, Settings, content_key

QUICK_POLL_S, POLL_S = 0.5, 2.0
QUICK_FOR_S = 60.0
LOG_EVERY_S = 60.0
REPORTED_ERROR = re.compile(r"(?:^|: )(?P<kind>\w+Error): (?P<sentence>.*)\Z", re.DOTALL)


Rule = Literal["wanted class", "fall back", "burst"]
MISSED_HEARTBEATS = 3
"""A worker that missed so many is gone; the server itself takes longer to say so."""
DEFAULT_HEARTBEAT_S = 30
PAGE = 200
Found = TypeVar("Found")


def is_online(worker: Worker, now: datetime) -> bool:
    """True where a worker's last heartbeat is recent."""
    if worker.last_heartbeat_time is None:
        return False
    interval_s = worker.heartbeat_interval_seconds or DEFAULT_HEARTBEAT_S
    return now - worker.last_heartbeat_time < timedelta(seconds=MISSED_HEARTBEATS * interval_s)


def num_online(client: SyncPrefectClient, pool: str) -> int:
    """Workers of a pool that sent a heartbeat lately; none where there is no such pool."""
    try:
        workers = client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        return 0
    now = server_now(client) if workers else None
    return sum(is_online(worker, now) for worker in workers if now)


def server_now(client: SyncPrefectClient) -> datetime:
    """This moment by the server's clock, to a second; what it has stamped is measured by that."""
    return parsedate_to_datetime(client.request("GET", "/health").headers["date"])


def paged(read: Callable[..., list[Found]], **filters: object) -> Iterator[Found]:
    """All that a call of the client gives, page by page."""
    offset = 0
    while page := read(**filters, limit=PAGE, offset=offset):
        yield from page
        offset += len(page)


@dataclass(frozen=True)
class Place:
    """A deployment that could run the stage, and its work pool as it is now."""

    deployment: str
    hardware_class: str
    pool: str | None = None
    num_workers_online: int = 0
    fault: str | None = None
    """Why it cannot take runs whatever its workers do, such as a pause."""
    num_waiting: int = 0
    """Runs of its pool that are due and that no worker has taken, but for those held on purpose."""
    cost_today: float = 0.0
    """What its pool's runs cost in the newest 24 hours, where `burst` gives a price."""
    barred: str | None = None
    """Why the data may not be there; waiting for a worker cannot help."""

    @property
    def refusal(self) -> str | None:
        """Why it cannot take a run now; None where it can."""
        if why := self.barred or self.fault:
            return f"{self.deployment}: {why}"
        if not self.num_workers_online:
            return f"{self.deployment}: no worker of work pool {self.pool!r} is online"
        return None


@dataclass(frozen=True)
class Choice:
    """The place that was chosen, or that the stage is to wait, or that there is none.

    Attributes:
        place: where to run; None while waiting and where there is none.
        wait: True where asking again later may help.
        rule: by which rule the place was chosen.
        reason: why, in a sentence.
        refused: places that were asked before, and why each was not taken.
    """

    place: Place | None
    wait: bool
    rule: Rule
    reason: str
    refused: tuple[str, ...] = ()


def choose(
    routing: StageRouting,
    wanted: Place,
    others: Sequence[Place],
    waited_s: float,
    burst: Place | None = None,
) -> Choice:
    """Where a stage goes now.

    The pool of `routing.burst` is taken while more runs wait in the wanted one than that says,
    where its price allows it. Else the wanted class is taken while it has a worker.
    Without one the stage waits as long as it may, then takes the first other class that has one.

    Args:
        routing: the stage's rule.
        wanted: the place of the class that it wants.
        others: the places of `routing.fall_back`, in that order.
        waited_s: seconds for which the wanted place has had no worker.
        burst: the place of `routing.burst`.
    """
    refusal, refused_burst = wanted.refusal, ""
    if burst is not None and routing.burst is not None:
        behind = f"{wanted.num_waiting} runs wait in work pool {wanted.pool!r}"
        if wanted.num_waiting > routing.burst.queue_longer_than:
            refused_burst = _refused_burst(burst, routing.burst) or ""
            if not refused_burst:
                reason = f"{behind}, more than {routing.burst.queue_longer_than}"
                return Choice(burst, False, "burst", reason, (refusal,) if refusal else ())
    if refusal is None:
        not_there = (refused_burst,) if refused_burst else ()
        return Choice(wanted, False, "wanted class", "it has a worker online", not_there)
    if waited_s < routing.wait_s and not wanted.barred:
        reason = f"{refusal}; waited {waited_s:.0f} s of at most {routing.wait_s:.0f} s"
        return Choice(None, True, "wanted class", reason)
    refused = [f"{refusal}, for {waited_s:.0f} s"]
    for place in others:
        paid = routing.burst if _is_burst(place.hardware_class, routing) else None
        refusal = _refused_burst(place, paid) if paid else place.refusal
        if refusal is None:
            reason = f"no worker of the wanted class for {waited_s:.0f} s; fall_back names this one"
            return Choice(place, False, "fall back", reason, tuple(refused))
        refused.append(refusal)
    reason = (
        f"{'; '.join(refused)}. Start a worker (`falaj worker {wanted.pool}`), wait longer "
        "(`routing.<stage>.wait_s`) or name another class (`routing.<stage>.fall_back`); "
        "finished stages are kept"
    )
    return Choice(None, False, "fall back", reason, tuple(refused))


def _is_burst(hardware_class: str, routing: StageRouting) -> bool:
    return routing.burst is not None and routing.burst.hardware_class == hardware_class


def _refused_burst(place: Place, rule: BurstRule) -> str | None:
    if place.cost_today >= rule.most_per_day:
        return (
            f"{place.deployment}: its runs of 24 hours cost {place.cost_today:.2f}, at most "
            f"{rule.most_per_day:g} a day"
        )
    return place.refusal


@dataclass(frozen=True)
class StageOrder:
    """One stage to be run on a work pool.

    Attributes:
        stage: name of the stage.
        flow_name: Prefect's name of its flow.
        parameters: the flow's arguments as plain JSON.
        routing: where stages may run.
        use_case: name of the use case.
        suffix: what the use case's deployments have after the class, such as `-houses`.
    """

    stage: StageName
    flow_name: str
    parameters: dict[str, Any]
    routing: RoutingConfig
    use_case: str
    suffix: str

    @property
    def digest(self) -> str:
        """Twelve digits that stand for the parameters, and for the code that reads the results."""
        return content_key(self.parameters, _reader_digest())[:12]

    def key(self, attempt: int) -> str:
        """Idempotency key of the attempt-th run for this stage of the current loop."""
        return f"{runtime.flow_run.id}:{self.stage.replace(' ', '-')}:{self.digest}:{attempt}"


@cache
def _reader_digest() -> str:
    """A result that was written for other contracts is not taken up: its stage runs again."""
    return content_key(*sorted((PROJECT_ROOT / "tasks" / "contracts").glob("*.py")), Path(__file__))


def cut_off(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Start a stage's run again after it was cut off; its own failures stand at once."""
    return isinstance(state.result(raise_on_failure=False), StageLostError)


def _cache_key(context: TaskRunContext, arguments: dict[str, Any]) -> str:
    """A stage that this loop has finished is finished for all later attempts of the loop."""
    return f"stage-{arguments['order'].key(0)}"


@task(
    name="run-stage",
    task_run_name="{order.stage}",
    cache_key_fn=_cache_key,
    **(KEPT | {"retry_condition_fn": cut_off}),
)
def run_stage(order: StageOrder) -> dict[str, Any]:
    """Run one stage on a work pool; returns its `route` and its flow's `result` as plain JSON.

    Safe to retry: a run that still goes on is taken up, and finished steps of a lost one are kept.

    Raises:
        StageError: no worker took it in time, or its run was cancelled. Not retried.
        StageLostError: its run was cut off. Retried.
        FalajError: the failure of the stage itself, with its own sentence. Not retried.
    """
    try:
        with get_client(sync_client=True) as client:
            stage = _Stage(order, client)
            with stage.cancelled_with_this_run():
                run, route = stage.run()
    except httpx.HTTPError as exc:
        if not is_api_away(exc):
            raise
        raise StageLostError(
            f"stage {order.stage}: the Prefect API went away ({exc}); trying again takes up what "
            "was started"
        ) from exc
    _check_completed(run, order.stage)
    return {"route": route.model_dump(mode="json"), "result": read_plain(run)}


class _Stage:
    """One stage while it is being placed and watched.

    Args:
        order: what to run.
        client: of the API.
    """

    def __init__(self, order: StageOrder, client: SyncPrefectClient) -> None:
        self._order, self._client, self._log = order, client, get_run_logger()
        self._run: FlowRun | None = None

    def run(self) -> tuple[FlowRun, StageRoute]:
        """Take up the stage's living or finished run, or choose a place and start one."""
        attempt, self._run = self._last_run()
        route = self._taken_up(self._run) if self._run else self._start(self._chosen(0), attempt)
        max_untaken_s = self._order.routing.of(self._order.stage).wait_s
        while True:
            assert self._run is not None
            ended, untaken_s = self._follow(self._run, route.pool, max_untaken_s)
            if untaken_s is None:
                return ended, route
            # Its pool lost its last worker before it began: back to the rule, which knows more now.
            if route.rule == "fall back":
                raise StageError(
                    f"stage {self._order.stage}: {route.taken} had no worker for {untaken_s:.0f} s "
                    "before the run began; start one and retry, finished stages are kept"
                )
            attempt += 1
            route = self._start(self._chosen(untaken_s), attempt)

    @contextmanager
    def cancelled_with_this_run(self) -> Iterator[None]:
        """Cancel the stage's run at once when this run is cancelled, not when it is only stopped.

        The server's own way to do it looks every 20 s.
        """
        try:
            yield
        except TerminationSignal:
            own = self._client.read_flow_run(UUID(str(runtime.flow_run.id)))
            stopping = own.state is not None and (
                own.state.is_cancelling() or own.state.is_cancelled()
            )
            if stopping and self._run is not None:
                message = f"The loop {own.name} was cancelled."
                self._client.set_flow_run_state(self._run.id, Cancelling(message=message))
            raise

    def _last_run(self) -> tuple[int, FlowRun | None]:
        """Number of the next attempt, and the run of this stage that goes on or is completed."""
        attempt = 0
        while True:
            wanted = {"idempotency_key": {"any_": [self._order.key(attempt)]}}
            found = self._client.read_flow_runs(
                flow_run_filter=FlowRunFilter.model_validate(wanted)
            )
            if not found:
                return attempt, None
            state = found[0].state
            if state is None or not state.is_final() or state.is_completed():
                return attempt, found[0]
            attempt += 1

    def _chosen(self, offline_s: float) -> Choice:
        """Ask the rule until it names a place.

        Raises:
            StageError: it names none.
        """
        order, began, logged = self._order, time.monotonic(), float("-inf")
        rule = order.routing.of(order.stage)
        while True:
            waited_s = offline_s + time.monotonic() - began
            wanted = self._place(rule.hardware_class)
            others = [self._place(name) for name in rule.fall_back]
            burst = None  # the own pool is cheaper while it is not behind
            if rule.burst and wanted.num_waiting > rule.burst.queue_longer_than:
                burst = self._place(rule.burst.hardware_class)
            choice = choose(rule, wanted, others, waited_s, burst)
            if choice.place is not None:
                return choice
            if not choice.wait:
                raise StageError(f"stage {order.stage} was not run: {choice.reason}")
            if time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                self._log.warning("stage %s waits: %s", order.stage, choice.reason)
            time.sleep(POLL_S)

    def _start(self, choice: Choice, attempt: int) -> StageRoute:
        """Start the deployment of the chosen place."""
        place, order = choice.place, self._order
        assert place is not None
        parameters = on_class(order.parameters, place.hardware_class)
        run: FlowRun = run_deployment(  # type: ignore[assignment]  # not awaited: no event loop
            place.deployment,
            parameters=parameters,
            idempotency_key=order.key(attempt),
            as_subflow=True,
            timeout=0,
        )
        self._run = run
        route = StageRoute(
            wanted=order.routing.of(order.stage).hardware_class,
            taken=place.deployment,
            pool=place.pool,
            rule=choice.rule,
            reason=choice.reason,
            refused=choice.refused,
            flow_run=str(run.id),
            price_per_hour=self._price(place.deployment),
        )
        level = self._log.info if choice.rule == "wanted class" else self._log.warning
        level("stage %s goes to %s (%s): %s", order.stage, route.taken, route.rule, route.reason)
        return route

    def _taken_up(self, run: FlowRun) -> StageRoute:
        taken = self._name_of(run)
        price = self._price(taken)
        return StageRoute(
            wanted=self._order.routing.of(self._order.stage).hardware_class,
            taken=taken,
            pool=run.work_pool_name,
            rule="taken up again" if price is None else "burst",
            reason="an earlier attempt of this loop had started it",
            flow_run=str(run.id),
            price_per_hour=price,
        )

    def _price(self, deployment: str) -> float | None:
        """What an hour there costs, where `burst` says so."""
        rule = self._order.routing.of(self._order.stage).burst
        is_there = rule and deployment == self._deployment(rule.hardware_class)
        return rule.price_per_hour if rule and is_there else None

    def _deployment(self, hardware_class: str) -> str:
        return f"{self._order.flow_name}/{hardware_class}{self._order.suffix}"

    def _seen(self, run: UUID) -> FlowRun:
        """The run as it is now; waits for a server that is away, however long that takes."""
        while True:
            try:
                return self._client.read_flow_run(run)
            except httpx.HTTPError as exc:  # after about a minute of Prefect's own attempts
                if not is_api_away(exc):
                    raise
                self._log.warning("the Prefect API is away (%s); still waiting", exc)
                time.sleep(POLL_S)

    def _follow(
        self, run: FlowRun, pool: str | None, max_untaken_s: float
    ) -> tuple[FlowRun, float | None]:
        """Wait for the end of a run, or until no worker was there to take it for too long.

        Returns:
            The run; and for how many seconds no worker was online, where it was given up.
        """
        began, shown = time.monotonic(), ""
        last_online = last_logged = began
        while True:
            run = self._seen(run.id)
            state, now = run.state, time.monotonic()
            if state is None or state.is_final():
                return run, None
            if state.name != shown:
                shown = state.name or ""
                self._log.info("stage %s: run %s is %s", self._order.stage, run.name, shown)
            if not state.is_scheduled() or pool is None or num_online(self._client, pool):
                last_online = now
            untaken_s = now - last_online
            if untaken_s and now - last_logged >= LOG_EVERY_S:
                last_logged = now
                self._log.warning(
                    "stage %s waits: no worker of work pool %r is online to take %s, for %.0f s of "
                    "at most %.0f s",
                    self._order.stage,
                    pool,
                    run.name,
                    untaken_s,
                    max_untaken_s,
                )
            if untaken_s > max_untaken_s:
                message = "No worker was online to take it; the loop goes on by its rule."
                self._client.set_flow_run_state(run.id, Cancelled(message=message))
                return run, untaken_s
            time.sleep(QUICK_POLL_S if now - began < QUICK_FOR_S else POLL_S)

    def _place(self, hardware_class: str) -> Place:
        """The deployment `<flow>/<class><suffix>` and its pool as they are now."""
        deployment = self._deployment(hardware_class)
        try:
            found = self._client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            missing = (
                f"there is no such deployment; describe the class {hardware_class} in {FILE_NAME} "
                "if it is missing there, then falaj deploy"
            )
            return Place(deployment, hardware_class, fault=missing)
        pool = found.work_pool_name
        if pool is None:
            return Place(deployment, hardware_class, fault="it has no work pool")
        fault = self._fault(found, pool)
        waiting = 0 if fault else num_waiting(self._client, pool)
        rule, cost = self._order.routing.of(self._order.stage), 0.0
        if rule.burst and _is_burst(hardware_class, rule):
            cost = self._hours_of(pool, waiting) * rule.burst.price_per_hour
        num = num_online(self._client, pool)
        barred = refused_pool(Settings.from_environment(), pool, self._order.parameters)
        return Place(deployment, hardware_class, pool, num, fault, waiting, cost, barred)

    def _hours_of(self, pool: str, num_waiting: int) -> float:
        """Hours of runs in the newest 24; a run that waits there counts as the mean of the others.

        A run that began before has at most its hours since then.
        """
        now = server_now(self._client)
        since = now - timedelta(days=1)
        begun = {"end_time": {"is_null_": True}, "start_time": {"is_null_": False}}
        wanted = ({"end_time": {"after_": since.isoformat()}}, begun)
        spans = {
            run.id: min(run.estimated_run_time, (run.end_time or now) - since)
            for filters in wanted
            for run in paged(self._client.read_flow_runs, **_runs_of(pool, filters))
        }
        total = sum(spans.values(), timedelta())
        return total / timedelta(hours=1) * (1 + num_waiting / max(len(spans), 1))

    def _name_of(self, run: FlowRun) -> str:
        """Deployment of a run, as `<flow>/<name>`."""
        if run.deployment_id is None:
            return "this process"
        return f"{self._order.flow_name}/{self._client.read_deployment(run.deployment_id).name}"

    def _fault(self, deployment: DeploymentResponse, pool: str) -> str | None:
        config = deployment.parameters.get("config")
        owner = config.get("name") if isinstance(config, dict) else None
        if owner not in (None, self._order.use_case):
            return f"it is of use case {owner!r}, not of {self._order.use_case!r}"
        if deployment.paused:
            return "the deployment is paused"
        if self._client.read_work_pool(pool).is_paused:
            return f"work pool {pool!r} is paused"
        return None


def num_waiting(client: SyncPrefectClient, pool: str) -> int:
    """Runs that are due, but for those that a queue or a deployment holds back by its limit."""
    queues = client.read_work_queues(work_pool_name=pool, limit=PAGE)
    free = [q.name for q in queues if not q.is_paused and q.concurrency_limit is None]
    state = {"type": {"any_": ["SCHEDULED"]}, "name": {"not_any_": ["AwaitingConcurrencySlot"]}}
    due = {"before_": datetime.now(UTC).isoformat()}
    waiting = _runs_of(pool, {"state": state, "expected_start_time": due})
    in_queues = WorkQueueFilter.model_validate({"name": {"any_": free}})
    return client.count_flow_runs(**waiting, work_queue_filter=in_queues)


def _runs_of(pool: str, filters: dict[str, Any]) -> dict[str, Any]:
    return {
        "flow_run_filter": FlowRunFilter.model_validate(filters),
        "work_pool_filter": WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
    }


def on_class(parameters: dict[str, Any], hardware_class: str) -> dict[str, Any]:
    """Parameters as the class needs them: training that fell back to processors does so."""
    config = parameters.get("config", {})
    training = config.get("training", {})
    if kind_of(hardware_class) != CPU or training.get("device") != "cuda":
        return parameters
    return {**parameters, "config": {**config, "training": {**training, "device": "cpu"}}}


def _check_completed(run: FlowRun, stage: str) -> None:
    """Raise what the stage's run ended with.

    Raises:
        StageError, StageLostError, FalajError: see `run_stage`.
    """
    state = run.state
    if state is not None and state.is_completed():
        return
    where = f"run {run.name}, {url_for(run) or run.id}"
    message = (state.message if state else None) or "it left no message"
    if state is not None and state.is_crashed():
        raise StageLostError(f"stage {stage} was cut off: {message} ({where})")
    if state is not None and state.is_cancelled():
        raise StageError(
            f"stage {stage} was cancelled: {message} ({where}). Finished stages are kept; retry "
            "the loop to go on"
        )
    raise child_error(message, where)


def child_error(message: str, where: str) -> FalajError:
    """The error that a state's message names, as our own kind where it is one.

    A run that failed because the Prefect API was away is as good as cut off.
    """
    found = REPORTED_ERROR.search(message)
    if found is None:
        return StageError(f"{message} ({where})")
    kind = getattr(tasks.kernel.errors, found["kind"], None)
    if isinstance(kind, type) and issubclass(kind, FalajError):
        return kind(f"{found['sentence']} ({where})")
    if _names_api_away(found["kind"], found["sentence"]):
        return StageLostError(f"the Prefect API was away: {found['sentence']} ({where})")
    return StageError(f"{message} ({where})")


def _names_api_away(kind: str, sentence: str) -> bool:
    """As `is_api_away`, of an error of which only the name and the sentence are known."""
    if kind == PrefectHTTPStatusError.__name__:
        return sentence.startswith("Server error")
    named = getattr(httpx, kind, None)
    return isinstance(named, type) and issubclass(named, httpx.TransportError)


MARKED = {"__class__", "data"}
"""Prefect writes a model as its class's name and its data."""


def dump_parameters(flow: Flow[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a flow as plain JSON, by name."""
    bound = inspect.signature(flow.fn).bind(*args, **kwargs).arguments
    hints = get_type_hints(flow.fn)
    return {
        name: TypeAdapter(hints[name]).dump_python(value, mode="json")
        for name, value in bound.items()
    }


def read_plain(run: FlowRun) -> Any:
    """What a completed run returned, as plain JSON.

    Raises:
        StageError: it kept no result, not as JSON, or not where this process can read it.
    """
    return unmarked(json.loads(_stored_text(run)))


def as_returned(plain: Any, flow: Flow[..., Any]) -> Any:
    """Plain JSON of a run's result as the value that `flow` returns.

    Raises:
        StageError: it is something else.
    """
    try:
        return TypeAdapter(get_type_hints(flow.fn)["return"]).validate_python(plain)
    except ValidationError as exc:
        raise StageError(
            f"a run of {flow.name} returned something else than this code's flow does "
            f"({exc.error_count()} faults, the first at {exc.errors()[0]['loc']}); its worker runs "
            "other code. Deploy the same code to all workers and retry"
        ) from exc


def unmarked(value: Any) -> Any:
    """Plain data of a value in which models are marked with their class."""
    if isinstance(value, dict):
        if value.keys() == MARKED:
            return unmarked(value["data"])
        return {name: unmarked(item) for name, item in value.items()}
    return [unmarked(item) for item in value] if isinstance(value, list) else value


def _stored_text(run: FlowRun) -> str:
    metadata = run.state.data if run.state else None
    record = metadata if isinstance(metadata, ResultRecordMetadata) else None
    kind = record.serializer.type if record else None
    if record is None or record.storage_key is None or kind != "json":  # a pickle can run code
        raise StageError(
            f"run {run.name} kept its result as {kind!r}; only 'json' is read. Deploy the code of "
            "this process to its worker and retry"
        )
    try:
        content: bytes = _storage(record).read_path(record.storage_key, _sync=True)
    except (ValueError, FileNotFoundError, OSError) as exc:
        raise StageError(
            f"the result of run {run.name} cannot be read here ({exc}); let all workers share one "
            "state (FALAJ_STATE, or one state folder on one host), then retry. The stage itself is "
            "finished"
        ) from exc
    return str(content, "utf-8")


class SharedResults(WritableFileSystem):
    """Results of flows and tasks, in the state, for runs on any machine that shares it.

    By names that hold no folder: Prefect's own local storage would write the state folder into its
    database, and in a copy of it read the files of the original.
    """

    _block_type_name = "Results in the state of Falaj"
    _block_type_slug = "falaj-results"
    _description = "Where runs on several machines keep their results; written by each deploy."

    async def aread_path(self, path: str) -> bytes:
        """See `read_path`."""
        return await to_thread.run_sync(self._read, path)

    @async_dispatch(aread_path)
    def read_path(self, path: str) -> bytes:  # type: ignore[override]  # as Prefect's own
        """Content of a result.

        Raises:
            ValueError: there is none.
        """
        return self._read(path)

    async def awrite_path(self, path: str, content: bytes) -> None:
        """See `write_path`."""
        await to_thread.run_sync(self._location().write, f"results/{path}", content)

    @async_dispatch(awrite_path)
    def write_path(self, path: str, content: bytes) -> None:  # type: ignore[override]  # the same
        """Keep a result."""
        self._location().write(f"results/{path}", content)

    def _read(self, path: str) -> bytes:
        content = self._location().read(f"results/{path}")
        if content is None:
            raise ValueError(f"no result {path} in {self._location().url}")
        return content

    @staticmethod
    def _location() -> Location:
        settings = Settings.from_environment()
        return settings.location or Location(settings.home.as_uri(), plain=True)


def keep_results() -> None:
    """Tell the server where results are, where no deploy has done so before.

    Raises:
        PrefectHTTPStatusError, httpx.HTTPError: the server refuses, or does not answer.
    """
    try:
        SharedResults.load("state")
    except ValueError:  # there is none
        SharedResults().save("state", overwrite=True)


def _storage(metadata: ResultRecordMetadata) -> Any:
    if metadata.storage_block_id is not None:
        return resolve_result_storage(metadata.storage_block_id)
    key = Path(str(metadata.storage_key))
    if key.is_absolute():  # what an unsaved local file system writes
        return LocalFileSystem(basepath=str(key.parent))
    return get_default_result_storage()
