"""Work pools and queues, as `infra/work_pools/pools.yaml` has them.

What is different where the work pools are Kubernetes': an image, and no leases of devices.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool, WorkQueue
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.config import faults
from infra.deploying.file import UseCase
from infra.deploying.items import MISSING, Comparison, differences
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT

IMAGE_VARIABLE = "FALAJ_IMAGE"
_IMAGE = re.compile(
    r"[a-z0-9][a-z0-9._/-]*(:[0-9]+/[a-z0-9._/-]+)?"  # a registry may have a port
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


def read_image(environment: Mapping[str, str] | None = None) -> str:
    """The image that runs are started from: this project, installed, with its requirements.

    Raises:
        ConfigurationError: it is not named, is no name of an image, or names whatever is newest.
            Without one Prefect takes an image of its own, in which no flow of this project is.
    """
    environment = os.environ if environment is None else environment
    image = environment.get(IMAGE_VARIABLE, "")
    example = "such as registry.example.org/falaj:1.4 or registry.example.org/falaj@sha256:..."
    if not image:
        raise ConfigurationError(
            f"variable {IMAGE_VARIABLE} is not set; pods need an image with this project in it, "
            f"{example} Export it and deploy again. Nothing was deployed"
        )
    found = _IMAGE.fullmatch(image)
    if found is None:
        raise ConfigurationError(
            f"{IMAGE_VARIABLE}={image!r} is no name of an image; expected {example} Nothing was "
            "deployed"
        )
    if found[2] in (None, ":latest") and not found[3]:
        raise ConfigurationError(
            f"{IMAGE_VARIABLE}={image!r} is whatever is newest, so two runs could be of two "
            f"releases; expected a tag or a digest, {example} Nothing was deployed"
        )
    return image


def with_image(template: Mapping[str, Any], image: str) -> dict[str, Any]:
    """A base job template whose runs are started from this image, unless they name another."""
    filled: dict[str, Any] = copy.deepcopy(dict(template))
    filled["variables"]["properties"]["image"]["default"] = image
    return filled


def without_leases(use_case: UseCase) -> UseCase:
    """The use case where Kubernetes gives each pod its devices: nobody else has them."""
    lease = {**use_case.config["lease"], "enabled": False}
    return replace(use_case, config={**use_case.config, "lease": lease})


FOLDER = PROJECT_ROOT / "infra" / "work_pools"
PoolType = Literal["process", "kubernetes"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Queue(_Entry):
    """One queue of every pool."""

    priority: int = Field(ge=1, description="1 is served first.")
    description: str
    limit: int | None = Field(default=None, ge=1, description="Runs under way at once.")


class Pool(_Entry):
    """One pool."""

    template: str = Field(description="File of its base job template, beside this file.")
    description: str
    limit: int | None = Field(default=None, ge=1, description="Runs under way at once.")


class PoolsFile(_Entry):
    """The whole file."""

    queues: dict[str, Queue]
    process: dict[str, Pool]
    kubernetes: dict[str, Pool]

    def pools(self, pool_type: PoolType) -> dict[str, Pool]:
        """The pools of a type, by name."""
        return self.process if pool_type == "process" else self.kubernetes


def read_pools_file(path: Path = FOLDER / "pools.yaml") -> PoolsFile:
    """Pools and queues.

    Raises:
        ConfigurationError: the file is missing or wrong.
    """
    try:
        return PoolsFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as exc:
        raise ConfigurationError(f"{path}: cannot be read ({exc.strerror})") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigurationError(f"{path.name} is no YAML: {exc}") from exc
    except ValidationError as exc:
        raise ConfigurationError(f"{path.name}: {faults(exc)}. Nothing was deployed") from exc


@dataclass(frozen=True)
class PoolItem:
    """One work pool as it should be. See `infra.deploying.items.Item`."""

    name: str
    pool_type: PoolType
    pool: Pool
    template: dict[str, Any]
    resume: bool = False

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"work pool {self.name}"

    async def compare(self, client: PrefectClient) -> Comparison:
        """See `Item`.

        Raises:
            ConfigurationError: the pool is of another type, which cannot be changed.
        """
        found = await _read(client, self.name)
        if found is None:
            return Comparison((MISSING,))
        if found.type != self.pool_type:
            raise ConfigurationError(
                f"work pool {self.name} is of type {found.type}, and {self.pool_type} is asked "
                "for; a pool's type cannot be changed. Say --pools "
                f"{found.type}, or delete the pool (its runs wait until it is there again)"
            )
        return _with_pause(list(differences(self._wanted(), _view(found))), found, self.resume)

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        wanted = self._wanted()
        if await _read(client, self.name) is None:
            await client.create_work_pool(
                WorkPoolCreate(name=self.name, type=self.pool_type, **wanted)
            )
            return
        if self.resume:
            wanted["is_paused"] = False
        await client.update_work_pool(self.name, WorkPoolUpdate(**wanted))

    def _wanted(self) -> dict[str, Any]:
        return {
            "description": self.pool.description,
            "base_job_template": self.template,
            "concurrency_limit": self.pool.limit,
        }


@dataclass(frozen=True)
class QueuesItem:
    """The queues of one pool as they should be: one item, for their priorities push each other."""

    pool: str
    queues: dict[str, Queue]
    resume: bool = False

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"queues of {self.pool}"

    async def compare(self, client: PrefectClient) -> Comparison:
        """See `Item`. Queues that people have added are left alone."""
        if await _read(client, self.pool) is None:
            return Comparison((MISSING,))
        found = {q.name: q for q in await client.read_work_queues(work_pool_name=self.pool)}
        faults: list[str] = []
        notes: list[str] = []
        for name, queue in self.queues.items():
            if name not in found:
                faults.append(f"{name} {MISSING}")
                continue
            wanted = _wanted_queue(queue)
            faults += differences(wanted, {k: getattr(found[name], k) for k in wanted}, name)
            paused = _with_pause([], found[name], self.resume, f"{name} ")
            faults += paused.differences
            notes += paused.notes
        return Comparison(tuple(faults), tuple(notes))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`. From the last to the first: a priority that is taken pushes its holder on."""
        found = {q.name: q for q in await client.read_work_queues(work_pool_name=self.pool)}
        for name, queue in sorted(self.queues.items(), key=lambda item: -item[1].priority):
            wanted = _wanted_queue(queue)
            if name not in found:
                await client.create_work_queue(
                    name,
                    description=queue.description,
                    concurrency_limit=queue.limit,
                    priority=queue.priority,
                    work_pool_name=self.pool,
                )
                continue
            if self.resume:
                wanted["is_paused"] = False
            await client.update_work_queue(found[name].id, **wanted)


def pool_items(
    file: PoolsFile,
    pool_type: PoolType,
    folder: Path = FOLDER,
    *,
    image: str | None = None,
    resume: bool = False,
) -> tuple[PoolItem | QueuesItem, ...]:
    """All pools of a type, each followed by its queues.

    Args:
        file: the pools and queues.
        pool_type: of which type.
        folder: where the templates are.
        image: of pods; None for processes.
        resume: switch on again what people have paused.

    Raises:
        ConfigurationError: a template is missing, or is no JSON.
    """
    items: list[PoolItem | QueuesItem] = []
    for name, pool in file.pools(pool_type).items():
        template = _read_template(folder / pool.template)
        if image is not None:
            template = with_image(template, image)
        items.append(PoolItem(name, pool_type, pool, template, resume))
        items.append(QueuesItem(name, file.queues, resume))
    return tuple(items)


def _read_template(path: Path) -> dict[str, Any]:
    try:
        template: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"{path}: no base job template can be read from it ({exc}). Nothing was deployed"
        ) from exc
    return template


def _wanted_queue(queue: Queue) -> dict[str, Any]:
    return {
        "description": queue.description,
        "priority": queue.priority,
        "concurrency_limit": queue.limit,
    }


def _view(found: WorkPool) -> dict[str, Any]:
    return {
        "description": found.description,
        "base_job_template": found.base_job_template,
        "concurrency_limit": found.concurrency_limit,
    }


def _with_pause(
    faults: list[str], found: WorkPool | WorkQueue, resume: bool, name: str = ""
) -> Comparison:
    if not found.is_paused:
        return Comparison(tuple(faults))
    if resume:
        return Comparison((*faults, f"{name}is paused"))
    return Comparison(tuple(faults), (f"{name}is paused, by a person; --resume switches it on",))


async def _read(client: PrefectClient, name: str) -> WorkPool | None:
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        return None
