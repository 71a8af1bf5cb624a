"""The deploy itself: compare each thing, write those that differ, read all back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

from infra.deploying.automations import AutomationItem, automation_items, leftover_automations
from infra.deploying.blocks import (
    HOW_TO_BE_TOLD,
    channel_blocks,
    channels_there,
    use_case_block,
)
from infra.deploying.deployments import OWN_TAG, DeploymentItem, deployment_items
from infra.deploying.file import PREFECT_FILE, read_prefect_file, read_use_cases
from infra.deploying.items import Item, Outcome
from infra.deploying.pools import PoolType, pool_items, read_image, read_pools_file, without_leases


@dataclass(frozen=True)
class Plan:
    """All that a deploy makes, in the order in which one thing needs another."""

    places: tuple[Item, ...]
    """Pools, queues and blocks."""
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
    """Read what is to be deployed; asks no server.

    Raises:
        ConfigurationError: a file or use case is wrong, or a variable is not set.
    """
    use_cases = read_use_cases(repos)
    image = None
    if pool_type == "kubernetes":
        image, use_cases = read_image(), tuple(without_leases(each) for each in use_cases)
    pools = pool_items(read_pools_file(), pool_type, image=image, resume=resume)
    return Plan(
        places=(*pools, use_case_block(use_cases), *channel_blocks()),
        deployments=deployment_items(read_prefect_file(file), use_cases, resume=resume),
        automations=automation_items(resume=resume),
    )


async def check(client: PrefectClient, plan: Plan) -> Outcome:
    """Compare all, change nothing."""
    outcome = Outcome()
    for item in plan.items:
        outcome.add(item.label, await item.compare(client))
    await _add_remarks(client, plan, outcome)
    return outcome


async def _add_remarks(client: PrefectClient, plan: Plan, outcome: Outcome) -> None:
    if not await channels_there(client):
        outcome.notes.append(f"nobody is told of failures: {HOW_TO_BE_TOLD}")
    for kind, found in await _leftovers(client, plan):
        outcome.notes.append(f"{kind} {found}: is no longer deployed; --prune removes it")


async def deploy(client: PrefectClient, plan: Plan, *, prune: bool = False) -> Outcome:
    """Write what differs, then read all back.

    Returns:
        What was written, and what still differs: nothing, or the server did not take it.
    """
    outcome, written = Outcome(), []
    for item in plan.items:
        found = await item.compare(client)
        outcome.add(item.label, found)
        if not found.is_equal:
            await item.write(client)
            written.append(item.label)
    if prune:
        written += await _remove_leftovers(client, plan)
    if written:
        outcome = await check(client, plan)
        outcome.written = written
    else:
        await _add_remarks(client, plan, outcome)
    return outcome


async def _leftovers(client: PrefectClient, plan: Plan) -> list[tuple[str, str]]:
    automations = await leftover_automations(client, plan.automations)
    deployments = await _leftover_deployments(client, plan)
    return [
        *(("deployment", name) for name in sorted(deployments)),
        *(("automation", name) for name in sorted(automations)),
    ]


async def _leftover_deployments(client: PrefectClient, plan: Plan) -> dict[str, UUID]:
    """Those of this project's own that it no longer has: full name to id.

    Not those of an earlier name: those go when the new one is written and no run needs them.
    """
    own = DeploymentFilter(tags=DeploymentFilterTags(all_=[OWN_TAG]))
    names = {n for item in plan.deployments for n in (item.full_name, item.earlier_name)}
    found = {}
    for deployment in await client.read_deployments(deployment_filter=own, limit=200):
        flow = await client.read_flow(deployment.flow_id)
        if (name := f"{flow.name}/{deployment.name}") not in names:
            found[name] = deployment.id
    return found


async def _remove_leftovers(client: PrefectClient, plan: Plan) -> list[str]:
    removed = []
    for name, deployment_id in (await _leftover_deployments(client, plan)).items():
        await client.delete_deployment(deployment_id)
        removed.append(f"deployment {name} (removed)")
    for name, automation_id in (await leftover_automations(client, plan.automations)).items():
        await client.delete_automation(automation_id)
        removed.append(f"automation {name} (removed)")
    return removed
