"""Whole loops from the command line, each on a repository and a state folder of its own."""

import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from falaj.project import open as open_project
from infra.bench.running import SMALL
from tasks.contracts.base import Artifact
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CHAMPION, RegisteredVersion, Registry
from tests.support.data.repository import SmallRepository
from tests.support.host.processes import falaj, run_falaj

NUM_DAYS = 31


def loop_repository(folder: Path) -> SmallRepository:
    """A repository of one month with a small model; gates as wide as so little data needs."""
    repository = SmallRepository(folder, NUM_DAYS)
    file = repository.path / "use_case.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | SMALL))
    return repository


@dataclass
class Loop:
    """One state folder and what its last run left there."""

    home: Path
    repository: SmallRepository

    def start(self, *words: str) -> subprocess.Popen[str]:
        return falaj("--home", str(self.home), "--repo", str(self.repository.path), *words)

    def run(self, *words: str, limit_s: float = 900) -> tuple[int, str]:
        home, repo = str(self.home), str(self.repository.path)
        return run_falaj("--home", home, "--repo", repo, *words, limit_s=limit_s)

    def succeed(self, *words: str) -> str:
        """What a command says, which must do well."""
        code, said = self.run(*words)
        assert code == 0, said
        return said

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home / "artifacts")

    @cached_property
    def record(self) -> RunRecord:
        return open_project(self.repository.path, self.home).latest_run().record

    def path(self, artifact: Artifact) -> Path:
        return self.store.path(artifact)


def champion_of(home: Path, name: str) -> RegisteredVersion:
    """The version that a state folder's registry has as champion."""
    settings = Settings.from_environment({"FALAJ_HOME": str(home)})
    return Registry(RegistryLocation.of(settings)).by_alias(name, CHAMPION)
