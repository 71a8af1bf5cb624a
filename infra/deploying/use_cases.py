"""The use cases that one platform serves: the first under plain names, each other under its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.config import read_pipeline_config
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings

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
