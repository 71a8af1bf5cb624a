"""`prefect.yaml` as this project writes it: fewer forms than Prefect takes, each checked.

The use cases that one platform serves: the first under plain names, each other under its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from prefect.client.schemas.schedules import CronSchedule
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flows.config import faults, read_pipeline_config
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT, Settings

PREFECT_FILE = PROJECT_ROOT / "prefect.yaml"
USE_CASE_REFERENCE = "{{ prefect.blocks.use-case.first }}"
"""Stands in the file for the first use case's configuration; Prefect reads it from that block."""

_PLACEHOLDER = re.compile(r"\{\{\s*(.*?)\s*\}\}")
Slug = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=60)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Schedule(_Entry):
    """When a deployment runs by itself."""

    slug: Slug = Field(description="Its name; with it the schedule's id survives a deploy.")
    cron: str = Field(description="Five fields, such as `5 * * * *`.")
    timezone: str = "UTC"
    active: Literal[False] | None = Field(
        default=None, description="False: off. Left out: on at first, and then as people set it."
    )
    parameters: dict[str, Any] = {}

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        CronSchedule(cron=self.cron, timezone=self.timezone)
        return self


class Limit(_Entry):
    """How many runs of a deployment may be under way."""

    limit: int = Field(ge=1)
    collision_strategy: Literal["ENQUEUE", "CANCEL_NEW"]


class PoolPlace(_Entry):
    """Where runs wait for a worker."""

    name: Slug
    work_queue_name: Slug
    job_variables: dict[str, Any] = {}


class Deployment(_Entry):
    """One entry of the file."""

    name: Slug
    description: str = Field(min_length=1)
    entrypoint: str = Field(
        pattern=r"^[a-z_]\w*(\.[a-z_]\w*){2,}$", description="Module path of the flow."
    )
    work_pool: PoolPlace
    tags: tuple[str, ...] = Field(min_length=1)
    parameters: dict[str, Any] = {}
    enforce_parameter_schema: Literal[True]
    concurrency_limit: Limit | None = None
    schedules: tuple[Schedule, ...] = ()

    @property
    def is_per_use_case(self) -> bool:
        """True where it takes the configuration of a use case: each has one of its own."""
        return USE_CASE_REFERENCE in self.parameters.values()


class PrefectFile(_Entry):
    """The whole file."""

    name: str
    prefect_version: str = Field(alias="prefect-version")
    pull: tuple[()] = Field(
        description="Empty, and never left out: see docs/explanation/operation.md."
    )
    definitions: dict[str, Any] = {}
    deployments: tuple[Deployment, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _refuse_twice([f"{d.entrypoint} as {d.name}" for d in self.deployments], "deployment")
        _refuse_twice([s.slug for d in self.deployments for s in d.schedules], "schedule slug")
        return self


def read_prefect_file(
    path: Path = PREFECT_FILE, environment: Mapping[str, str] | None = None
) -> PrefectFile:
    """The deployments of a `prefect.yaml`, with `{{ $VARIABLE }}` filled in.

    Raises:
        ConfigurationError: the file is missing or wrong, or names a variable that is not set:
            Prefect itself would only warn, and deploy nothing in its place.
    """
    environment = os.environ if environment is None else environment
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigurationError(f"{path}: cannot be read ({exc.strerror})") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigurationError(f"{path.name} is no YAML: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path.name} says nothing; expected deployments")
    # Anchors are written there, and have been taken in where they are used.
    content = {**content, "definitions": {}}
    if wrong := sorted(set(_unfilled(content, environment))):
        raise ConfigurationError(f"{path.name}: {'; '.join(wrong)}. Nothing was deployed")
    try:
        return PrefectFile.model_validate(_filled(content, environment))
    except ValidationError as exc:
        raise ConfigurationError(f"{path.name}: {faults(exc)}. Nothing was deployed") from exc


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _unfilled(content: object, environment: Mapping[str, str]) -> Iterator[str]:
    for text in _texts(content):
        for name in _PLACEHOLDER.findall(text):
            if name.startswith("$"):
                if not environment.get(name[1:]):
                    yield f"variable {name[1:]} is not set; export it and deploy again"
            elif text != USE_CASE_REFERENCE:
                yield f"{text!r} cannot be filled in; known are {{{{ $VARIABLE }}}} and, as a \
whole value, {USE_CASE_REFERENCE}"


def _filled(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return (
            value
            if value == USE_CASE_REFERENCE
            else _PLACEHOLDER.sub(lambda match: environment[match[1][1:]], value)
        )
    if isinstance(value, dict):
        return {key: _filled(inner, environment) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, environment) for inner in value]
    return value


def _refuse_twice(names: list[str], kind: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{kind} {', '.join(twice)} is there more than once; expected one of each")


REPOS_VARIABLE = "FALAJ_FEATURE_REPOS"


@dataclass(frozen=True)
class UseCase:
    """One feature repository and what it says."""

    name: str
    config: Mapping[str, Any]
    """Its `PipelineConfig`, whole, as JSON."""
    repo_on_workers: str | None
    """Where workers find the repository; None where their own environment says it."""

    is_first: bool = False
    """True for the use case whose deployments bear plain names."""

    def deployment_name(self, name: str) -> str:
        """A deployment's name for this use case: `cpu`, or `cpu-<use case>`."""
        return name if self.is_first else f"{name}-{self.name}"


def read_use_cases(
    repos: Sequence[str], environment: Mapping[str, str] | None = None
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
    environment = os.environ if environment is None else environment
    repos = list(repos) or [r for r in environment.get(REPOS_VARIABLE, "").split(":") if r]
    repos = repos or [str(Settings.from_environment(environment).feature_repo)]
    own = Settings.from_environment(environment).feature_repo
    found = tuple(_read(repo, own, is_first=place == 0) for place, repo in enumerate(repos))
    if twice := _more_than_once([use_case.name for use_case in found]):
        raise ConfigurationError(
            f"two feature repositories describe a use case named {twice}; give one of "
            "them another name in its use_case.yaml. Nothing was deployed"
        )
    models = [use_case.config["registry"]["model_name"] for use_case in found]
    if twice := _more_than_once(models):
        raise ConfigurationError(
            f"two use cases register their models as {twice}, so one's candidate would replace the "
            "other's champion; give one another `registry.model_name` in its use_case.yaml. "
            "Nothing was deployed"
        )
    return found


def _more_than_once(names: Sequence[str]) -> str:
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _read(repo: str, own: Path, *, is_first: bool) -> UseCase:
    """One use case; `own` is the repository that workers have without being told another."""
    path, _, on_workers = repo.partition("=")
    folder = Path(path).expanduser().resolve()
    config = read_pipeline_config(folder)
    is_known = is_first and folder == own and not on_workers
    return UseCase(
        name=config.name,
        config=config.model_dump(mode="json"),
        repo_on_workers=None if is_known else on_workers or str(folder),
        is_first=is_first,
    )
