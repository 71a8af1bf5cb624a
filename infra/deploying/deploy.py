"""The deploy itself: compare each thing, write those that differ, read all back."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.exceptions import PrefectHTTPStatusError

from infra.deploying.automations import (
    HOW_TO_BE_TOLD,
    AutomationItem,
    channel_blocks,
    channels_there,
    decide_on_drift,
    notifications,
    notify,
)
from infra.deploying.deployments import OWN_TAG, DeploymentItem, deployment_items, on_all_classes
from infra.deploying.file import PREFECT_FILE, PoolType, read_prefect_file, read_use_cases
from infra.deploying.items import RESULTS, Item, Outcome, use_case_block
from infra.deploying.pools import pool_items, read_image, without_leases
from infra.images.sign import check_image
from infra.orchestration.worker import digest, digests
from infra.platform.api import wait_for_server
from tasks.contracts.hardware import known_class, read_classes
from tasks.governance import signing
from tasks.governance.signing import record_path
from tasks.kernel.errors import SignatureError, TransientError
from tasks.kernel.keys.choice import trusted_keys
from tasks.kernel.keys.store import MODELS
from tasks.kernel.settings import Settings
from tasks.kernel.tenants import has_tenants
from tasks.metadata.identity import EXPECTED, check_tenant, state_identity

AnyItem = TypeVar("AnyItem", bound=Item)
NUM_ATTEMPTS = 3
"""Where a server that starts is waited for, one that restarts meanwhile is tried again."""


class NoAnswerError(TransientError):
    """The server was away; the state of the last request is unknown."""


@dataclass(frozen=True)
class Plan:
    """All that a deploy makes, in the order in which one thing needs another.

    Attributes:
        places: pools, queues and blocks.
    """

    places: tuple[Item, ...]
    deployments: tuple[DeploymentItem, ...]
    automations: tuple[AutomationItem, ...]

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them."""
        return (*self.places, *self.deployments, *self.automations)


def make_plan(
    repos: Sequence[str] = (),
    *,
    file: Path = PREFECT_FILE,
    pool_type: PoolType = "process",
    resume: bool = False,
) -> Plan:
    """Read what is to be deployed; asks no server but that of the state.

    Raises:
        ConfigurationError: a file or use case is wrong, or a variable is not set.
        SignatureError: nobody who is trusted signed the image.
    """
    use_cases = read_use_cases(repos)
    classes = read_classes()
    for use_case in use_cases:
        for stage, rule in use_case.config["routing"].items():
            for name in _classes_of(rule) if isinstance(rule, dict) else ():
                known_class(name, classes, f"{use_case.name}: routing.{stage}")
    image = None
    if pool_type == "kubernetes":
        image, use_cases = read_image(), tuple(without_leases(each) for each in use_cases)
        check_image(Settings.from_environment().home, image)

    def resuming(items: Sequence[AnyItem]) -> tuple[AnyItem, ...]:
        return tuple(replace(item, resume=resume) for item in items)

    pools = pool_items(pool_type, image, classes)
    state = state_identity(Settings.from_environment())
    described = on_all_classes(read_prefect_file(file), classes)
    return Plan(
        places=resuming([*pools, use_case_block(use_cases), RESULTS, *channel_blocks()]),
        deployments=resuming(deployment_items(described, use_cases, state)),
        automations=resuming([decide_on_drift(), *map(notify, notifications())]),
    )


def _classes_of(rule: dict[str, Any]) -> list[str]:
    """All classes that a stage's rule names."""
    others = [rule["burst"]["hardware_class"]] if rule["burst"] else []
    return [rule["hardware_class"], *rule["fall_back"], *others]


async def check(client: PrefectClient, plan: Plan) -> Outcome:
    """Compare all, change nothing."""
    outcome = await _compared(client, plan)
    await _add_remarks(client, plan, outcome)
    for subject, files in (await _digests(client, plan)).items():
        try:
            signing.check_record(Settings.from_environment().home, subject, files)
        except SignatureError as exc:
            outcome.differences.append(str(exc))
    return outcome


async def _compared(client: PrefectClient, plan: Plan) -> Outcome:
    outcome = Outcome()
    for item in plan.items:
        outcome.add(item.label, await item.compare(client))
    return outcome


async def deploy(client: PrefectClient, plan: Plan, *, prune: bool = False) -> Outcome:
    """Write what differs, then read all back.

    Returns:
        What was written, and what still differs: nothing, or the server did not take it.

    Raises:
        ConfigurationError: the server is another tenant's, whose workers would take the runs.
    """
    home = Settings.from_environment().home
    for one in await client.read_deployments() if has_tenants(home) else ():
        if named := (one.job_variables or {}).get("env", {}).get(EXPECTED):
            check_tenant(home, named.rpartition(".")[2], f"Prefect at {client.api_url}")
    outcome, written = Outcome(), []
    for item in plan.items:
        compared = await item.compare(client)
        outcome.add(item.label, compared)
        if compared.differences:
            await item.write(client)
            written.append(item.label)
    if prune:
        written += [label async for label in _leftovers(client, plan, remove=True)]
    if written:
        outcome = await _compared(client, plan)
        outcome.written = written
    await _add_remarks(client, plan, outcome)
    if not outcome.differences:
        trusted = trusted_keys(home, MODELS)
        for subject, files in (await _digests(client, plan)).items():
            try:
                signing.verify(trusted, subject, signing.read(record_path(home, subject)), files)
            except SignatureError:
                signing.sign(home, subject, files)
    return outcome


async def _digests(client: PrefectClient, plan: Plan) -> dict[str, dict[str, str]]:
    """What is signed of each pool, image included, and deployment on the server; of no secret."""
    found = [(i.label, await i.found(client)) for i in plan.items if not i.is_secret]
    return {
        f"deployments/{name}": {**digests(one.view), "view.json": digest(one.view)}
        for name, one in found
        if one
    }


async def _add_remarks(client: PrefectClient, plan: Plan, outcome: Outcome) -> None:
    if not await channels_there(client):
        outcome.notes.append(f"nobody is told of failures: {HOW_TO_BE_TOLD}")
    async for label in _leftovers(client, plan):
        outcome.notes.append(f"{label}: is no longer deployed; --prune removes it")


async def _leftovers(
    client: PrefectClient, plan: Plan, *, remove: bool = False
) -> AsyncIterator[str]:
    """Deployments and automations of this project's own that it no longer has."""
    known = {item.label for item in plan.items}
    own = DeploymentFilter(tags=DeploymentFilterTags(all_=[OWN_TAG]))
    for found in await client.read_deployments(deployment_filter=own, limit=200):
        label = f"deployment {(await client.read_flow(found.flow_id)).name}/{found.name}"
        if label not in known:
            if remove:
                await client.delete_deployment(found.id)
            yield f"{label} (removed)" if remove else label
    for automation in await client.read_automations(limit=200):
        label = f"automation {automation.name}"
        if OWN_TAG in automation.tags and label not in known:
            if remove:
                await client.delete_automation(automation.id)
            yield f"{label} (removed)" if remove else label


def run(plan: Plan, wait_s: float = 0, *, only_check: bool = False, prune: bool = False) -> Outcome:
    """Compare, or write what differs, on the server of the environment.

    Args:
        plan: what is to be there.
        wait_s: for a server that is starting.
        only_check: change nothing.
        prune: remove deployments and automations of ours that the plan no longer has.

    Raises:
        TransientError: the server was away, or refused.
    """
    for attempt in range(NUM_ATTEMPTS if wait_s else 1):
        if wait_s:
            wait_for_server(wait_s)
        try:
            return asyncio.run(_run(plan, only_check, prune))
        except NoAnswerError as exc:
            if not wait_s or attempt == NUM_ATTEMPTS - 1:
                raise
            sys.stderr.write(f"again, once it answers: {exc}\n")
    raise AssertionError("unreachable")


async def _run(plan: Plan, only_check: bool, prune: bool) -> Outcome:
    try:
        async with get_client() as client:
            if only_check:
                return await check(client, plan)
            return await deploy(client, plan, prune=prune)
    except PrefectHTTPStatusError as exc:
        raise TransientError(
            f"the server refused {exc.request.method} {exc.request.url.path} with "
            f"{exc.response.status_code}: {exc.response.text[:300]}. What was written before is "
            "kept; correct the cause and deploy again"
        ) from exc
    except (httpx.TransportError, RuntimeError) as exc:
        if isinstance(exc, RuntimeError) and "Failed to reach API" not in str(exc):
            raise
        raise NoAnswerError(
            f"the server at {os.environ['PREFECT_API_URL']} does not answer ({exc}); is it up? "
            "What was written before is kept; deploy again"
        ) from exc
