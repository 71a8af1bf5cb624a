"""Work pools and queues, as `infra/work_pools/pools.yaml` has them.

What is different where the work pools are Kubernetes': an image, and no leases of devices.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool, WorkQueue
from prefect.exceptions import ObjectNotFound

from infra.deploying.file import POOLS_FOLDER, PoolType, Queue, UseCase, read_pools_file
from infra.deploying.items import Found, Item
from tasks.kernel.errors import ConfigurationError

IMAGE_VARIABLE = "FALAJ_IMAGE"
_IMAGE = re.compile(
    r"[a-z0-9][a-z0-9._/-]*(:[0-9]+/[a-z0-9._/-]+)?"  # a registry may have a port
    r"(:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)


def read_image(environment: Mapping[str, str] | None = None) -> str:
    """The image that runs are started from: this project, installed, with its requirements.

    Raises:
        ConfigurationError: it is not named, is no name of an image, or names whatever is newest.
            Without one Prefect takes an image of its own, in which no flow of this project is.
    """
    environment = os.environ if environment is None else environment
    image = environment.get(IMAGE_VARIABLE, "")
    if _IMAGE.fullmatch(image) is None:
        raise ConfigurationError(
            f"{IMAGE_VARIABLE}={image!r} names no release of an image with this project in it; "
            "expected a tag or a digest, such as registry.example.org/falaj:1.4 or "
            "registry.example.org/falaj@sha256:... Nothing was deployed"
        )
    return image


def without_leases(use_case: UseCase) -> UseCase:
    """The use case where Kubernetes gives each pod its devices: nobody else has them."""
    lease = {**use_case.config["lease"], "enabled": False}
    return replace(use_case, config={**use_case.config, "lease": lease})


@dataclass(frozen=True, kw_only=True)
class PoolItem(Item):
    """One work pool."""

    name: str
    pool_type: PoolType
    description: str
    template: Mapping[str, Any]

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"work pool {self.name}"

    async def wanted(self, client: PrefectClient) -> dict[str, Any]:
        """See `Item`."""
        return {"description": self.description, "base_job_template": self.template}

    async def found(self, client: PrefectClient) -> Found | None:
        """See `Item`.

        Raises:
            ConfigurationError: the pool is of another type, which cannot be changed.
        """
        found = await _read(client, self.name)
        if found is None:
            return None
        if found.type != self.pool_type:
            raise ConfigurationError(
                f"work pool {self.name} is of type {found.type}, and {self.pool_type} is asked "
                "for; a pool's type cannot be changed. Say --pools "
                f"{found.type}, or delete the pool (its runs wait until it is there again)"
            )
        return Found(_view(found, await self.wanted(client)), _paused(found))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        wanted = await self.wanted(client)
        if await _read(client, self.name) is None:
            made = WorkPoolCreate(name=self.name, type=self.pool_type, **wanted)
            await client.create_work_pool(made)
        else:
            await client.update_work_pool(self.name, WorkPoolUpdate(**_resumed(wanted, self)))


@dataclass(frozen=True, kw_only=True)
class QueuesItem(Item):
    """The queues of one pool: one item, for their priorities push each other.

    Queues that people have added are left alone.
    """

    pool: str
    queues: Mapping[str, Queue]

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"queues of {self.pool}"

    async def wanted(self, client: PrefectClient) -> dict[str, Any]:
        """See `Item`. From the last to the first: a priority that is taken pushes its holder on."""
        ordered = sorted(self.queues.items(), key=lambda item: -item[1].priority)
        return {
            name: {
                "description": queue.description,
                "priority": queue.priority,
                "concurrency_limit": queue.limit,
            }
            for name, queue in ordered
        }

    async def found(self, client: PrefectClient) -> Found | None:
        """See `Item`."""
        if await _read(client, self.pool) is None:
            return None
        found = await self._there(client)
        wanted = await self.wanted(client)
        views = {name: _view(queue, wanted[name]) for name, queue in found.items()}
        return Found(views, tuple(one for n, q in found.items() for one in _paused(q, f"{n} ")))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        found = await self._there(client)
        for name, wanted in (await self.wanted(client)).items():
            if name in found:
                await client.update_work_queue(found[name].id, **_resumed(wanted, self))
            else:
                await client.create_work_queue(name, work_pool_name=self.pool, **wanted)

    async def _there(self, client: PrefectClient) -> dict[str, WorkQueue]:
        found = await client.read_work_queues(work_pool_name=self.pool)
        return {queue.name: queue for queue in found if queue.name in self.queues}


def pool_items(pool_type: PoolType, image: str | None, *, resume: bool) -> tuple[Item, ...]:
    """All pools of a type, each followed by its queues.

    Args:
        pool_type: of which type.
        image: from which pods are started, unless they name another; None for processes.
        resume: see `Item`.
    """
    file, items = read_pools_file(), list[Item]()
    for name, pool in (file.process if pool_type == "process" else file.kubernetes).items():
        template: dict[str, Any] = json.loads((POOLS_FOLDER / pool.template).read_text())
        if image is not None:
            template["variables"]["properties"]["image"]["default"] = image
        items += [
            PoolItem(
                resume=resume,
                name=name,
                pool_type=pool_type,
                description=pool.description,
                template=template,
            ),
            QueuesItem(resume=resume, pool=name, queues=file.queues),
        ]
    return tuple(items)


def _view(found: WorkPool | WorkQueue, wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(found, name) for name in wanted}


def _paused(found: WorkPool | WorkQueue, name: str = "") -> tuple[str, ...]:
    return (f"{name}is paused",) if found.is_paused else ()


def _resumed(wanted: dict[str, Any], item: Item) -> dict[str, Any]:
    return wanted | ({"is_paused": False} if item.resume else {})


async def _read(client: PrefectClient, name: str) -> WorkPool | None:
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        return None
