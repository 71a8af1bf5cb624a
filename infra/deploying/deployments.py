"""Deployments: each entry of the file, once for each use case that it is configured by."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from prefect import Flow
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentScheduleUpdate,
    DeploymentUpdate,
)
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import MissingFlowError
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from infra.deploying.file import (
    USE_CASE_REFERENCE,
    Deployment,
    PrefectFile,
    UseCase,
    more_than_once,
)
from infra.deploying.items import Found, Item, if_there
from tasks.contracts.hardware import HardwareClass, kind_of
from tasks.conversion.targets.catalog import format_of
from tasks.kernel.errors import ConfigurationError
from tasks.metadata.identity import EXPECTED

OWN_TAG = "falaj"
"""On all that this project deploys, so that what it no longer deploys can be told."""


@dataclass(frozen=True, kw_only=True)
class DeploymentItem(Item):
    """One deployment."""

    flow: Flow[..., Any]
    entry: Deployment
    use_case: UseCase | None
    state: str = ""
    """Identity of the state that all workers have to share."""

    @property
    def name(self) -> str:
        """Its name below the flow's: `cpu`, or `cpu-<use case>` of another than the first."""
        if self.use_case is None or self.use_case.is_first:
            return self.entry.name
        return f"{self.entry.name}-{self.use_case.name}"

    @property
    def full_name(self) -> str:
        """`<flow>/<name>`."""
        return f"{self.flow.name}/{self.name}"

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"deployment {self.full_name}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Default parameters, the use case's configuration filled in."""
        config = dict(self.use_case.config) if self.use_case else None
        given = self.entry.parameters.items()
        return {name: config if v == USE_CASE_REFERENCE else v for name, v in given}

    @property
    def job_variables(self) -> dict[str, Any]:
        """Job variables, with the state, and the use case's repository, as workers need them."""
        variables = self.entry.work_pool.job_variables
        told = {EXPECTED: self.state} if self.state else {}
        if self.use_case is not None and self.use_case.repo_on_workers is not None:
            told["FALAJ_FEATURE_REPO"] = self.use_case.repo_on_workers
        return {**variables, "env": {**variables.get("env", {}), **told}} if told else variables

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
        schema = schema_of(self.flow)
        unknown = sorted(set(self.parameters) - set(schema.get("properties", {})))
        wrong = [f"there is no parameter {name}" for name in unknown] or [
            f"{fault.json_path}: {fault.message}"
            for fault in validate(self.parameters, schema, ignore_required=True)
        ]
        if wrong:
            raise ConfigurationError(f"{self.label}: {'; '.join(wrong)}. Nothing was deployed")

    async def wanted(self, client: PrefectClient) -> dict[str, Any]:
        """See `Item`."""
        limit = self.entry.concurrency_limit
        return self._fields() | {
            "tags": sorted(self.tags),
            "concurrency_options": limit.collision_strategy if limit else None,
            "schedules": {
                s.slug: {"cron": s.cron, "timezone": s.timezone, "off": s.active is False}
                for s in self.entry.schedules
            },
        }

    async def found(self, client: PrefectClient) -> Found | None:
        """See `Item`. A schedule that is off counts as paused, unless the file wants it off."""
        found = await read_deployment(client, self.full_name)
        if found is None:
            return None
        limit, options = found.global_concurrency_limit, found.concurrency_options
        named = self._fields().keys() - {"concurrency_limit"}  # deprecated in the response
        view = {name: getattr(found, name) for name in named} | {
            "pull_steps": found.pull_steps or [],
            "tags": sorted(found.tags),
            "concurrency_limit": limit.limit if limit else None,
            "concurrency_options": options.collision_strategy.value if options and limit else None,
        }
        to_be_off = {s.slug for s in self.entry.schedules if s.active is False}
        view["schedules"] = {
            s.slug or str(s.id): {
                **s.schedule.model_dump(mode="json", include={"cron", "timezone"}),
                "off": not s.active and s.slug in to_be_off,
            }
            for s in found.schedules
        }
        off = {s.slug for s in found.schedules if not s.active} - to_be_off
        paused = [f"schedule {s.slug} is paused" for s in self.entry.schedules if s.slug in off]
        return Found(view, (*paused, *(["it is paused"] if found.paused else [])))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`. Schedules that the file does not have are removed: an update keeps them."""
        found = await read_deployment(client, self.full_name)
        if found is None:
            flow_id = await client.create_flow_from_name(self.flow.name)
            made = [DeploymentScheduleCreate(**each) for each in self._schedules(switch_on=True)]
            fields = self._fields()
            await client.create_deployment(flow_id, self.name, schedules=made, **fields)
            return
        slugs = {schedule.slug for schedule in self.entry.schedules}
        for schedule in found.schedules:
            if schedule.slug not in slugs:
                await client.delete_deployment_schedule(found.id, schedule.id)
        kept = [DeploymentScheduleUpdate(**each) for each in self._schedules(self.resume)]
        update = self._fields() | {"schedules": kept} | ({"paused": False} if self.resume else {})
        await client.update_deployment(found.id, DeploymentUpdate(**update))

    def _fields(self) -> dict[str, Any]:
        """What creating, updating and comparing have in common."""
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
            "parameter_openapi_schema": schema_of(self.flow),
            "enforce_parameter_schema": True,
            "concurrency_limit": limit.limit if limit else None,
            "concurrency_options": ConcurrencyOptions.model_validate(options) if options else None,
        }

    def _schedules(self, switch_on: bool) -> Iterator[dict[str, Any]]:
        """Without a word on whether one is on, unless it is asked for: a person may have paused."""
        for each in self.entry.schedules:
            active = True if switch_on and each.active is None else each.active
            cron = CronSchedule(cron=each.cron, timezone=each.timezone)
            given: dict[str, Any] = {"schedule": cron, "slug": each.slug, "parameters": {}}
            yield given if active is None else {**given, "active": active}


def deployment_items(
    file: PrefectFile, use_cases: Sequence[UseCase], state: str = ""
) -> tuple[DeploymentItem, ...]:
    """All deployments of a file, for all use cases; `state` is the identity that workers share.

    Raises:
        ConfigurationError: an entry point is no flow, parameters do not fit it, or two deployments
            have one name.
    """
    items = tuple(
        DeploymentItem(
            flow=load_flow(entry.entrypoint), entry=entry, use_case=use_case, state=state
        )
        for entry in file.deployments
        # One that takes the configuration of a use case is there for each.
        for use_case in (use_cases if USE_CASE_REFERENCE in entry.parameters.values() else [None])
    )
    if twice := more_than_once([item.label for item in items]):
        raise ConfigurationError(
            f"{twice} would be there more than once; name them apart. Nothing was deployed"
        )
    for item in items:
        item.check()
    return items


def on_all_classes(file: PrefectFile, classes: Mapping[str, HardwareClass]) -> PrefectFile:
    """The deployments of `cpu` and `gpu` again for each further class of that kind.

    They have no schedules: those of the first are enough.

    Raises:
        ConfigurationError: a format that a class names does not exist or is not for its kind.
    """
    there = {(entry.entrypoint, entry.name) for entry in file.deployments}
    made = [
        _on_class(entry, name, found)
        for name, found in classes.items()
        for entry in file.deployments
        if entry.name == entry.work_pool.name == kind_of(name)
        and (entry.entrypoint, name) not in there
    ]
    return file.model_copy(update={"deployments": (*file.deployments, *made)})


def _on_class(entry: Deployment, name: str, described: HardwareClass) -> Deployment:
    for one in described.formats or ():
        if not format_of(one).is_for(name):
            raise ConfigurationError(
                f"hardware class {name} names the format {one}, which is for "
                f"{' and '.join(format_of(one).hardware)}; take it away there. Nothing was deployed"
            )
    parameters = entry.parameters
    if "hardware" in parameters:
        formats = {"formats": list(described.formats)} if described.formats else {}
        hardware = {**(parameters["hardware"] or {}), "hardware_class": name, **formats}
        parameters = {**parameters, "hardware": hardware}
    changed = {
        "name": name,
        "description": f"{entry.description} On {name}: {described.description}",
        "work_pool": entry.work_pool.model_copy(update={"name": name}),
        "parameters": parameters,
        "schedules": (),
    }
    return entry.model_copy(update=changed)


def load_flow(entrypoint: str) -> Flow[..., Any]:
    """The flow at a module path.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such flow.
    """
    try:
        return load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
    except (ImportError, AttributeError, MissingFlowError) as exc:
        raise ConfigurationError(
            f"entry point {entrypoint}: {exc}; install the project or correct the path. Nothing "
            "was deployed"
        ) from exc


async def read_deployment(client: PrefectClient, full_name: str) -> DeploymentResponse | None:
    """A deployment; None where there is none."""
    return await if_there(client.read_deployment_by_name(full_name))


@cache
def schema_of(flow: Flow[..., Any]) -> dict[str, Any]:
    """Schema of a flow's parameters; kept, for it takes a while and is asked for often."""
    return parameter_schema(flow).model_dump(mode="json", exclude_unset=True)
