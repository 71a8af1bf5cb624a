"""Deployments: each entry of the file, once for each use case that it is configured by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentScheduleUpdate,
    DeploymentUpdate,
)
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import ParameterSchema, parameter_schema
from prefect.utilities.schema_tools.validation import validate

from infra.deploying.file import USE_CASE_REFERENCE, Deployment, PrefectFile, Schedule, UseCase
from infra.deploying.items import MISSING, Comparison, differences
from tasks.kernel.errors import ConfigurationError

OWN_TAG = "falaj"
"""On all that this project deploys, so that what it no longer deploys can be told."""

EARLIER_NAME = "coordinator"
"""Name that earlier versions gave to each deployment that now has its flow's name."""
EARLIER_FLOWS = {"retraining-sweep": "governor-sweep"}
"""Flow, and the slug of its schedule, to the name that earlier versions gave it."""


@dataclass(frozen=True)
class DeploymentItem:
    """One deployment as it should be. See `infra.deploying.items.Item`."""

    flow: Flow[..., Any]
    entry: Deployment
    use_case: UseCase | None
    resume: bool = False
    """True: what people have paused is switched on again."""

    @property
    def name(self) -> str:
        """Its name below the flow's."""
        if self.use_case is None:
            return self.entry.name
        return self.use_case.deployment_name(self.entry.name)

    @property
    def full_name(self) -> str:
        """`<flow>/<name>`."""
        return f"{self.flow.name}/{self.name}"

    @property
    def earlier_name(self) -> str | None:
        """`<flow>/<name>` as earlier versions deployed it; None where that was the same."""
        if self.entry.name != self.flow.name:
            return None
        name = self.use_case.deployment_name(EARLIER_NAME) if self.use_case else EARLIER_NAME
        return f"{EARLIER_FLOWS.get(self.flow.name, self.flow.name)}/{name}"

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"deployment {self.full_name}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Default parameters, the use case's configuration filled in."""
        return self._filled(self.entry.parameters)

    @property
    def job_variables(self) -> dict[str, Any]:
        """Job variables; they say where the use case's repository is, where workers do not know."""
        variables = dict(self.entry.work_pool.job_variables)
        if self.use_case is not None and self.use_case.repo_on_workers is not None:
            environment = {**variables.get("env", {})}
            environment["FALAJ_FEATURE_REPO"] = self.use_case.repo_on_workers
            variables["env"] = environment
        return variables

    @property
    def tags(self) -> list[str]:
        """Tags; a further use case's have its name as well."""
        if self.use_case is None or self.use_case.is_first:
            return list(self.entry.tags)
        return [*self.entry.tags, self.use_case.name]

    def check(self) -> None:
        """Refuse parameters that the flow would refuse.

        Raises:
            ConfigurationError: one is unknown, or its value does not fit the flow's signature.
        """
        schema = _schema_of(self.flow).model_dump()
        for place, parameters in self._all_parameters():
            unknown = sorted(set(parameters) - set(schema["properties"]))
            wrong = [f"there is no parameter {name}" for name in unknown] or [
                f"{fault.json_path}: {fault.message}"
                for fault in validate(parameters, schema, ignore_required=True)
            ]
            if wrong:
                raise ConfigurationError(
                    f"{self.label}, {place}: {'; '.join(wrong)}. Nothing was deployed"
                )

    def _all_parameters(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "parameters", self.parameters
        for schedule in self.entry.schedules:
            yield f"schedule {schedule.slug}", self._filled(schedule.parameters)

    def _filled(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        config = dict(self.use_case.config) if self.use_case else None
        return {k: config if v == USE_CASE_REFERENCE else v for k, v in parameters.items()}

    def wanted(self) -> dict[str, Any]:
        """All that is compared, as JSON."""
        limit = self.entry.concurrency_limit
        return self._fields() | {
            "tags": sorted(self.tags),
            "concurrency_options": limit.collision_strategy if limit else None,
            "schedules": {s.slug: self._wanted_schedule(s) for s in self.entry.schedules},
        }

    def _wanted_schedule(self, schedule: Schedule) -> dict[str, Any]:
        return {
            "cron": schedule.cron,
            "timezone": schedule.timezone,
            "parameters": self._filled(schedule.parameters),
        }

    async def compare(self, client: PrefectClient) -> Comparison:
        """See `Item`."""
        found = await _read(client, self.full_name)
        if found is None:
            return Comparison((MISSING,))
        faults = list(differences(self.wanted(), _view(found)))
        earlier, num_unfinished = await self._earlier(client)
        notes = []
        if earlier and (earlier.schedules or not num_unfinished):
            faults.append(f"{self.earlier_name}, its earlier name, is there as well")
        elif earlier:
            notes.append(
                f"{num_unfinished} runs of {self.earlier_name}, its earlier name, have not ended; "
                "a deploy after that removes it"
            )
        there = {s.slug: s.active for s in found.schedules if s.slug}
        off = {slug for slug, active in there.items() if not active}
        to_be_off = {s.slug for s in self.entry.schedules if s.active is False}
        known = {s.slug for s in self.entry.schedules}
        faults += [
            f"schedule {slug} should be off and is on"
            for slug in sorted((to_be_off & set(there)) - off)
        ]
        paused = [f"schedule {slug} is paused" for slug in sorted((off & known) - to_be_off)]
        paused += ["it is paused"] * found.paused
        if self.resume:
            return Comparison((*faults, *paused), tuple(notes))
        notes += [f"{p}, by a person; --resume switches it on" for p in paused]
        return Comparison(tuple(faults), tuple(notes))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        found = await _read(client, self.full_name)
        if found is None:
            await self._create(client)
        else:
            await self._update(client, found)
        await self._retire_earlier(client)

    async def _update(self, client: PrefectClient, found: DeploymentResponse) -> None:
        await self._remove_schedules(client, found)
        update = self._fields() | {"schedules": [self._updated(s) for s in self.entry.schedules]}
        if self.resume:
            update["paused"] = False
        await client.update_deployment(found.id, DeploymentUpdate(**update))

    async def _create(self, client: PrefectClient) -> UUID:
        """Create it, with all that was paused under its earlier name paused."""
        earlier = None if self.resume else (await self._earlier(client))[0]
        off = {s.slug for s in earlier.schedules if not s.active} if earlier else set()
        return await client.create_deployment(
            flow_id=await client.create_flow_from_name(self.flow.name),
            name=self.name,
            paused=earlier.paused if earlier else None,
            schedules=[self._created(schedule, off) for schedule in self.entry.schedules],
            **self._fields(),
        )

    async def _earlier(self, client: PrefectClient) -> tuple[DeploymentResponse | None, int]:
        """The deployment of the earlier name, and how many runs still need it.

        Those are all that have not ended, but for runs that a schedule has planned: one that a
        person or a flow has asked for would be deleted with it, and one that waits for an answer
        could not continue.
        """
        found = await _read(client, self.earlier_name) if self.earlier_name else None
        if found is None:
            return None, 0
        runs = await client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found.id])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(
                    type=FlowRunFilterStateType(not_any_=list(TERMINAL_STATES))
                )
            ),
        )
        planned = [r for r in runs if r.auto_scheduled and r.state and r.state.is_scheduled()]
        return found, len(runs) - len(planned)

    async def _retire_earlier(self, client: PrefectClient) -> None:
        """Stop the schedules of the earlier name; remove it once no run needs it."""
        earlier, num_unfinished = await self._earlier(client)
        if earlier is None:
            return
        for schedule in earlier.schedules:
            await client.delete_deployment_schedule(earlier.id, schedule.id)
        if num_unfinished:  # they go on with this code, whose modules may bear other names
            await client.update_deployment(earlier.id, DeploymentUpdate(**self._fields()))
        else:
            await client.delete_deployment(earlier.id)

    def _fields(self) -> dict[str, Any]:
        """What creating and updating have in common."""
        limit = self.entry.concurrency_limit
        options = {"collision_strategy": limit.collision_strategy} if limit else None
        return {
            "description": self.entry.description,
            "entrypoint": self.entry.entrypoint,
            "path": None,
            "pull_steps": [],
            "work_pool_name": self.entry.work_pool.name,
            "work_queue_name": self.entry.work_pool.work_queue_name,
            "job_variables": self.job_variables,
            "tags": self.tags,
            "parameters": self.parameters,
            "parameter_openapi_schema": _json_schema_of(self.flow),
            "enforce_parameter_schema": True,
            "concurrency_limit": limit.limit if limit else None,
            "concurrency_options": ConcurrencyOptions.model_validate(options) if options else None,
        }

    async def _remove_schedules(self, client: PrefectClient, found: DeploymentResponse) -> None:
        """Remove those that the file does not have: an update would keep them."""
        slugs = {schedule.slug for schedule in self.entry.schedules}
        for schedule in found.schedules:
            if schedule.slug not in slugs:
                await client.delete_deployment_schedule(found.id, schedule.id)

    def _created(self, schedule: Schedule, off: Set[str | None]) -> DeploymentScheduleCreate:
        return DeploymentScheduleCreate(
            schedule=_cron(schedule),
            active=schedule.active is not False
            and not off & {schedule.slug, EARLIER_FLOWS.get(schedule.slug)},
            slug=schedule.slug,
            parameters=self._filled(schedule.parameters),
        )

    def _updated(self, schedule: Schedule) -> DeploymentScheduleUpdate:
        """Without a word on whether it is on, unless the file has one: a person may have paused."""
        active = True if self.resume and schedule.active is None else schedule.active
        update: dict[str, Any] = {
            "schedule": _cron(schedule),
            "slug": schedule.slug,
            "parameters": self._filled(schedule.parameters),
        }
        if active is not None:
            update["active"] = active
        return DeploymentScheduleUpdate(**update)


def deployment_items(
    file: PrefectFile, use_cases: Sequence[UseCase], *, resume: bool = False
) -> tuple[DeploymentItem, ...]:
    """All deployments of a file, for all use cases.

    Raises:
        ConfigurationError: an entry point is no flow, parameters do not fit it, or two deployments
            have one name.
    """
    items = tuple(
        DeploymentItem(load_flow(entry.entrypoint), entry, use_case, resume)
        for entry in file.deployments
        for use_case in (use_cases if entry.is_per_use_case else [None])
    )
    names = [item.full_name for item in items]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"deployment {', '.join(twice)} would be there more than once; name them apart. "
            "Nothing was deployed"
        )
    for item in items:
        item.check()
    return items


def load_flow(entrypoint: str) -> Flow[..., Any]:
    """The flow at a module path.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such flow.
    """
    module, _, name = entrypoint.rpartition(".")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as exc:
        raise ConfigurationError(
            f"entry point {entrypoint}: {exc}; install the project or mend the path. Nothing was "
            "deployed"
        ) from exc
    if not isinstance(found, Flow):
        raise ConfigurationError(
            f"entry point {entrypoint}: module {module} has no flow {name}. Nothing was deployed"
        )
    return found


async def find_id(client: PrefectClient, full_name: str) -> UUID | None:
    """Id of a deployment; None where there is none."""
    found = await _read(client, full_name)
    return found.id if found else None


async def _read(client: PrefectClient, full_name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _view(found: DeploymentResponse) -> dict[str, Any]:
    limit, options = found.global_concurrency_limit, found.concurrency_options
    return {
        "description": found.description,
        "entrypoint": found.entrypoint,
        "path": found.path,
        "pull_steps": found.pull_steps or [],
        "work_pool_name": found.work_pool_name,
        "work_queue_name": found.work_queue_name,
        "job_variables": found.job_variables,
        "tags": sorted(found.tags),
        "parameters": found.parameters,
        "parameter_openapi_schema": found.parameter_openapi_schema,
        "enforce_parameter_schema": found.enforce_parameter_schema,
        "concurrency_limit": limit.limit if limit else None,
        "concurrency_options": options.collision_strategy.value if options and limit else None,
        "schedules": {
            schedule.slug or f"without a slug ({schedule.id})": _schedule_view(schedule.schedule)
            | {"parameters": schedule.parameters}
            for schedule in found.schedules
        },
    }


def _schedule_view(schedule: Any) -> dict[str, Any]:
    if isinstance(schedule, CronSchedule):
        return {"cron": schedule.cron, "timezone": schedule.timezone}
    shown: dict[str, Any] = schedule.model_dump(mode="json")
    return shown


@cache
def _schema_of(flow: Flow[..., Any]) -> ParameterSchema:
    """Schema of a flow's parameters; kept, for it takes a while and is asked for often."""
    return parameter_schema(flow)


def _json_schema_of(flow: Flow[..., Any]) -> dict[str, Any]:
    return _schema_of(flow).model_dump(mode="json", exclude_unset=True)


def _cron(schedule: Schedule) -> CronSchedule:
    return CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
