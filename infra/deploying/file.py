"""What is deployed: `prefect.yaml` and `pools.yaml`, each checked, and the use cases.

The first use case has plain deployment names, each other one its own.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from prefect.client.schemas.schedules import CronSchedule
from pydantic import Field, model_validator

from flows.config import read_pipeline_config
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import Settings
from tasks.kernel.values import Contract, checked

PREFECT_FILE = Path(__file__).with_name("prefect.yaml")  # a link to the one at the top
POOLS_FOLDER = Path(__file__).parents[1] / "work_pools"
USE_CASE_REFERENCE = "{{ prefect.blocks.use-case.first }}"
"""Of the first use case's configuration, in the file; Prefect reads it from that block."""

PLACEHOLDER = re.compile(r'"([^"]*\{\{[^"]*)"')
Slug = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=60)]
PoolType = Literal["process", "kubernetes"]


File = TypeVar("File", bound=Contract)


class Schedule(Contract):
    """When a deployment runs by itself; with its slug a schedule's id survives a deploy.

    With `active: false` it is off; without a word it is on at first, and then as people set it.
    """

    slug: Slug
    cron: str
    timezone: str = "UTC"
    active: Literal[False] | None = None

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        CronSchedule(cron=self.cron, timezone=self.timezone)
        return self


class Limit(Contract):
    """How many runs of a deployment may be under way."""

    limit: int = Field(ge=1)
    collision_strategy: Literal["ENQUEUE", "CANCEL_NEW"]


class PoolPlace(Contract):
    """Where runs wait for a worker."""

    name: Slug
    work_queue_name: Slug
    job_variables: dict[str, Any] = Field(default={})


class Deployment(Contract):
    """One entry of the file; the entry point is the flow's module path."""

    name: Slug
    description: str = Field(min_length=1)
    entrypoint: str = Field(pattern=r"^[a-z_]\w*(\.[a-z_]\w*){2,}$")
    work_pool: PoolPlace
    tags: tuple[str, ...] = Field(min_length=1)
    parameters: dict[str, Any] = Field(default={})
    enforce_parameter_schema: Literal[True]
    concurrency_limit: Limit | None = None
    schedules: tuple[Schedule, ...] = ()


class PrefectFile(Contract):
    """The whole of `prefect.yaml`; `pull` is empty, see docs/explanation/operation.md."""

    name: str
    prefect_version: str = Field(alias="prefect-version")
    pull: tuple[()]
    deployments: tuple[Deployment, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [f"{d.entrypoint} as {d.name}" for d in self.deployments]
        names += [s.slug for d in self.deployments for s in d.schedules]
        if twice := more_than_once(names):
            raise ValueError(f"{twice} is there more than once; expected one of each")
        return self


class Queue(Contract):
    """One queue of every pool; priority 1 is served first."""

    priority: int = Field(ge=1)
    description: str
    limit: int | None = Field(default=None, ge=1, serialization_alias="concurrency_limit")


class Pool(Contract):
    """One pool; the template is the file of its base job template, beside `pools.yaml`."""

    template: str
    description: str


class PoolsFile(Contract):
    """The whole of `pools.yaml`."""

    queues: dict[str, Queue]
    process: dict[str, Pool]
    kubernetes: dict[str, Pool]


def read_prefect_file(path: Path = PREFECT_FILE) -> PrefectFile:
    """The deployments of a `prefect.yaml`.

    Raises:
        ConfigurationError: the file is missing or wrong, or refers to something that Prefect would
            fill in: it would only warn where that is missing, and deploy nothing in its place.
    """
    return _read(path, PrefectFile)


def read_pools_file() -> PoolsFile:
    """Pools and queues.

    Raises:
        ConfigurationError: the file is missing or wrong.
    """
    return _read(POOLS_FOLDER / "pools.yaml", PoolsFile)


def _read(path: Path, kind: type[File]) -> File:
    content = read_yaml(path, str(path), f"{path} does not exist. Nothing was deployed")
    content.pop("definitions", None)  # anchors, which were taken in where they are used
    others = set(PLACEHOLDER.findall(json.dumps(content))) - {USE_CASE_REFERENCE}
    if others:
        raise ConfigurationError(
            f"{path}: {', '.join(sorted(others))} cannot be filled in; as a whole value "
            f"{USE_CASE_REFERENCE} can. Nothing was deployed"
        )
    return checked(kind, content, path.name, "Nothing was deployed")


def more_than_once(names: Sequence[str]) -> str:
    """Those that are there more than once, for a message."""
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


@dataclass(frozen=True)
class UseCase:
    """One feature repository and what it describes.

    Attributes:
        config: its `PipelineConfig`, as JSON.
        repo_on_workers: where workers find it; None where their own environment has it.
        is_first: its deployments have plain names.
    """

    name: str
    config: Mapping[str, Any]
    repo_on_workers: str | None
    is_first: bool = False


def read_use_cases(
    repos: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[UseCase, ...]:
    """The use cases of a deploy.

    Args:
        repos: folders of feature repositories, each `PATH` or `PATH=PATH_ON_WORKERS`. Empty: those
            of `FALAJ_FEATURE_REPOS`, separated by colons; without it the one of
            `FALAJ_FEATURE_REPO`, or the default.
        environment: instead of the process's.

    Raises:
        ConfigurationError: a repository describes no use case, or two have one name or would
            register their models under one.
    """
    own = Settings.from_environment(environment).feature_repo
    repos = list(repos) or [r for r in environment.get("FALAJ_FEATURE_REPOS", "").split(":") if r]
    found = tuple(_use_case(r, own, place == 0) for place, r in enumerate(repos or [str(own)]))
    names = [use_case.name for use_case in found]
    models = [str(use_case.config["registry"]["model_name"]) for use_case in found]
    if twice := more_than_once(names) or more_than_once(models):
        raise ConfigurationError(
            f"{twice} is the name of two use cases, or of the models of two, so one would replace "
            "the other's champion; give one another `name` and `registry.model_name` in its "
            "use_case.yaml. Nothing was deployed"
        )
    return found


def _use_case(repo: str, own: Path, is_first: bool) -> UseCase:
    """One use case; `own` is the repository that workers have without being told another."""
    path, _, on_workers = repo.partition("=")
    folder = Path(path).expanduser().resolve()
    config = read_pipeline_config(folder)
    is_known = is_first and folder == own and not on_workers
    where = None if is_known else on_workers or str(folder)
    return UseCase(config.name, config.model_dump(mode="json"), where, is_first)
