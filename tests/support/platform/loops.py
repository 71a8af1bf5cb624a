"""Whole loops from the command line, each on a repository and a state folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from infra.bench.running import SMALL
from tasks.contracts.base import Artifact
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore, Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CHAMPION, RegisteredVersion, Registry
from tests.support.data.repository import SmallRepository

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

    def command(self, *words: str) -> list[str]:
        return [
            *(sys.executable, "-m", "falaj"),
            *("--home", str(self.home), "--repo", str(self.repository.path)),
            *words,
        ]

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        return subprocess.Popen(
            self.command(*words),
            cwd=PROJECT_ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, limit_s: float = 600) -> tuple[int, str]:
        with self.start(*words) as process:
            said, _ = process.communicate(timeout=limit_s)
        return process.returncode, said

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home / "artifacts")

    @cached_property
    def facts(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(
            (self.home / "reports" / "latest" / "report.json").read_text()
        )
        return content

    @property
    def record(self) -> RunRecord:
        return RunRecord.model_validate({k: self.facts[k] for k in RunRecord.model_fields})

    def path(self, artifact: Artifact) -> Path:
        return self.store.path(artifact)


def champion_of(home: Path, name: str) -> RegisteredVersion:
    """The version that a state folder's registry has as champion."""
    settings = Settings.from_environment({"FALAJ_HOME": str(home)})
    found = Registry(RegistryLocation.of(settings)).by_alias(name, CHAMPION)
    assert found is not None
    return found
