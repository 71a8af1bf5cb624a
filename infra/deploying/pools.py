"""Work pools and queues, as `infra/work_pools/pools.yaml` has them.

What is different where the work pools are Kubernetes': an image, and no leases of devices.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool, WorkQueue

from infra.deploying.file import POOLS_FOLDER, Pool, PoolType, Queue, UseCase, read_pools_file
from infra.deploying.items import Found, Item, if_there
from tasks.contracts.hardware import CLASS_VARIABLE, HardwareClass, InCluster, kind_of
from tasks.kernel.errors import ConfigurationError

IMAGE_VARIABLE = "FALAJ_IMAGE"
_IMAGE = re.compile(
    r"[a-z0-9][a-z0-9._/-]*(:[0-9]+/[a-z0-9._/-]+)?"  # a registry may have a port
    r"(:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)


def read_image(environment: Mapping[str, str] = os.environ) -> str:
    """The image that runs are started from: this project, installed, with its requirements.

    Raises:
        ConfigurationError: it is not named, is no name of an image, or names whatever is newest.
            Without one Prefect takes an image of its own, in which no flow of this project is.
    """
    image = environment.get(IMAGE_VARIABLE, "")
    if _IMAGE.fullmatch(image) is None:
        raise ConfigurationError(
            f"{IMAGE_VARIABLE}={image!r} names no release of an image with this project in it; "
            "expected a tag or a digest, such as registry.example.org/falaj:1.4 or "
            "registry.example.org/falaj@sha256:...; `make image` builds one. Nothing was deployed"
        )
    return image


def without_leases(use_case: UseCase) -> UseCase:
    """The use case where Kubernetes gives each pod its devices: nobody else has them."""
    lease = {**use_case.config["lease"], "enabled": False}
    return replace(use_case, config={**use_case.config, "lease": lease})


@dataclass(frozen=True, kw_only=True)
class PoolItem(Item):
    """One work pool with its queues; queues that people have added are left alone."""

    name: str
    pool_type: PoolType
    description: str
    template: Mapping[str, Any]
    queues: Mapping[str, Queue]

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"work pool {self.name}"

    async def wanted(self, client: PrefectClient) -> dict[str, Any]:
        """See `Item`. Queues from the last to the first: a priority pushes its holder on."""
        ordered = sorted(self.queues.items(), key=lambda item: -item[1].priority)
        queues = {name: queue.model_dump(by_alias=True) for name, queue in ordered}
        own = {"description": self.description, "base_job_template": self.template}
        return {**own, "queues": queues}

    async def found(self, client: PrefectClient) -> Found | None:
        """See `Item`.

        Raises:
            ConfigurationError: the pool is of another type, which cannot be changed.
        """
        pool, queues = await self._there(client)
        if pool is None:
            return None
        if pool.type != self.pool_type:
            raise ConfigurationError(
                f"work pool {self.name} is of type {pool.type}, and {self.pool_type} is asked "
                "for; a pool's type cannot be changed. Say --pools "
                f"{pool.type}, or delete the pool (its runs wait until it is there again)"
            )
        wanted = await self.wanted(client)
        of_queues = wanted.pop("queues")
        there = {n: {f: getattr(queue, f) for f in of_queues[n]} for n, queue in queues.items()}
        view = {name: getattr(pool, name) for name in wanted} | {"queues": there}
        paused = [f"queue {name} is paused" for name, queue in queues.items() if queue.is_paused]
        return Found(view, (*(["it is paused"] if pool.is_paused else []), *paused))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        pool, queues = await self._there(client)
        wanted = await self.wanted(client)
        of_queues = wanted.pop("queues")
        resumed: dict[str, Any] = {"is_paused": False} if self.resume else {}
        if pool is None:
            made = WorkPoolCreate(name=self.name, type=self.pool_type, **wanted)
            await client.create_work_pool(made)
            _, queues = await self._there(client)  # Prefect makes one by itself
        else:
            await client.update_work_pool(self.name, WorkPoolUpdate(**wanted, **resumed))
        for name, fields in of_queues.items():
            if name in queues:
                await client.update_work_queue(queues[name].id, **fields, **resumed)
            else:
                await client.create_work_queue(name, work_pool_name=self.name, **fields)

    async def _there(self, client: PrefectClient) -> tuple[WorkPool | None, dict[str, WorkQueue]]:
        pool = await if_there(client.read_work_pool(self.name))
        if pool is None:
            return None, {}
        found = await client.read_work_queues(work_pool_name=self.name)
        return pool, {queue.name: queue for queue in found if queue.name in self.queues}


def pool_items(
    pool_type: PoolType, image: str | None, classes: Mapping[str, HardwareClass]
) -> tuple[Item, ...]:
    """All pools of a type: those of `pools.yaml`, and one for each further hardware class.

    Args:
        pool_type: of which type.
        image: from which pods are started, unless they name another; None for processes.
        classes: all hardware classes; one without a pool of its name has one like its kind's.
    """
    file = read_pools_file()
    pools = dict(file.process if pool_type == "process" else file.kubernetes)
    for name, described in classes.items():
        like = pools[kind_of(name)]
        pools.setdefault(name, like.model_copy(update={"description": described.description}))
    return tuple(
        PoolItem(
            name=name,
            pool_type=pool_type,
            description=pool.description,
            template=_template(name, pool, pool_type, image, classes.get(name)),
            queues=file.queues,
        )
        for name, pool in pools.items()
    )


def _template(
    name: str, pool: Pool, pool_type: PoolType, image: str | None, found: HardwareClass | None
) -> dict[str, Any]:
    """The base job template of a pool; of a class that `found` describes, its own devices."""
    template: dict[str, Any] = json.loads((POOLS_FOLDER / pool.template).read_text())
    if image is not None:
        template["variables"]["properties"]["image"]["default"] = image
    if found is None:
        return template
    job = template["job_configuration"]
    if pool_type == "process":
        job["env"][CLASS_VARIABLE] = name
        return template
    pod = job["job_manifest"]["spec"]["template"]["spec"]
    if found.kubernetes.node_selector:
        pod["nodeSelector"] = found.kubernetes.node_selector
    limits = pod["containers"][0]["resources"]["limits"]
    if (number := limits.pop(InCluster().gpu_resource, None)) is not None:
        limits[found.kubernetes.gpu_resource] = number
    return template
