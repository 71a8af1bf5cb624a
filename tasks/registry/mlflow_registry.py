"""Runs, model versions and aliases: the few operations this room needs of MLflow, typed.

Every method raises only `TransientError`, `StorageError` or `RegistryError`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.contracts.base import Contract, ModelVersionRef
from tasks.governance import signing
from tasks.governance.journal import Journal
from tasks.kernel.errors import RegistryError
from tasks.kernel.keys.choice import TRUSTED
from tasks.kernel.settings import bring, drop, put, send
from tasks.registry import connection

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

CANDIDATE = "candidate"
CHAMPION = "champion"
PROGRAM_TAG = "program_sha256"
SNAPSHOT_TAG = "snapshot_sha256"
MANIFEST_TAG = "manifest_sha256"  # of `model.json`
ORIGIN_TAG = "origin"  # where a program comes from that was trained elsewhere
VARIANTS_TAG = "variants_sha256"  # of `variants.json`
KEPT_TAG = "kept_variants"
RECALIBRATED_TAG = "recalibrated_from"  # number of the version whose network it has
COMPRESSED_TAG = "compressed_from"  # number of the version whose network was made smaller
# Of a version that was made from another; the last is what versions before 2026-11-25 have.
MADE_FROM_TAGS = (RECALIBRATED_TAG, COMPRESSED_TAG, "shrunk_from")
TRAINED_BY_TAG = "trained_by"  # subject of the run that trained or imported it
INCUMBENT_TAG = "rival"  # number of the version that the evaluation compared with
DECISION_TAG = "promotion"
DECISION_SHA_TAG = "promotion_sha256"
PREVIOUS_TAG = "previous_champion"
WITHDRAWN_TAG = "withdrawn"  # of a version that must never serve again: why
OWNER_TAG = "use_case"  # of a registered model: who registers and promotes under its name
NOBODY = "none"
MODEL_FOLDER, MANIFEST_FILE, PICTURES = "model", "model.json", "pictures"
ADOPTED = "adopted"
"""What is signed once all versions of earlier releases are."""
_MAX_PARAMETERS = 100  # MLflow's bounds on one batch
_MAX_METRICS = 1000


@dataclass(frozen=True)
class RegisteredVersion:
    """One model version as the registry's database knows it."""

    name: str
    number: int
    run_id: str
    folder: Path
    """The model's folder on this machine; nothing says yet that it is whole."""
    tags: Mapping[str, str]
    state: Path
    """State folder, whose keys are trusted."""
    created: datetime | None = None

    def __str__(self) -> str:
        return f"{self.name} version {self.number}"

    @property
    def subject(self) -> str:
        """What its signatures name: its run too, so that no folder stands for another."""
        return f"models/{self.name}/{self.run_id}"

    @property
    def ref(self) -> ModelVersionRef:
        """The value that travels.

        Raises:
            RegistryError: it lacks the digests, so it was registered by something else.
        """
        if not {PROGRAM_TAG, SNAPSHOT_TAG} <= self.tags.keys():
            raise RegistryError(
                f"{self} has no tags {PROGRAM_TAG} and {SNAPSHOT_TAG}: it was not registered by "
                "this pipeline, so nothing vouches for it. Point the alias at a version that was"
            )
        return ModelVersionRef(
            name=self.name,
            version=self.number,
            run_id=self.run_id,
            program_sha256=self.tags[PROGRAM_TAG],
            snapshot_sha256=self.tags[SNAPSHOT_TAG],
        )


@dataclass(frozen=True)
class MetricPoint:
    """One number of a run's history."""

    name: str
    value: float
    step: int = 0


@dataclass(frozen=True)
class StartedRun:
    """A run that is being filled."""

    run_id: str
    folder: Path


@dataclass(frozen=True)
class RunState:
    """A run that was found, and whether it has ended."""

    run_id: str
    is_complete: bool


def may_adopt(state: Path) -> bool:
    """Whether versions without a signature are of an earlier release: none was registered since.

    Whoever can make it look so by removing a file of the state can add a key to it as well; with
    `FALAJ_TRUSTED_KEYS` nothing is adopted.
    """
    known = signing.read(signing.record_path(state, ADOPTED))
    return known is None and not os.environ.get(TRUSTED)


def adopt(version: RegisteredVersion) -> None:
    """Sign what an earlier release registered, as it is; the registry's digests are asked later."""
    folder = bring(version.folder)
    for root in (folder / MANIFEST_FILE, folder / "variants.json"):
        source = root.with_name(f"{root.name}{signing.END}")
        if root.is_file() and signing.read(source) is None:
            names = [path.name for path in folder.iterdir() if path.suffix != signing.END]
            files = signing.digests(folder, names)
            signing.sign(version.state, version.subject, files, source)


class _Client:
    """MLflow's client; whatever it and its database raise is one of the errors named above."""

    def __init__(self, location: connection.RegistryLocation) -> None:
        self._explained = connection.explained(location)
        made = self._explained(connection.load_mlflow().MlflowClient)
        self._client = made(tracking_uri=location.uri, registry_uri=location.uri)

    def __getattr__(self, name: str) -> Any:
        return self._explained(getattr(self._client, name))


class Registry:
    """One open registry.

    Args:
        location: where it is; an absent SQLite database is created.
    """

    def __init__(self, location: connection.RegistryLocation) -> None:
        connection.prepare_database(location)
        self.location, self.state = location, location.home or location.artifacts.parent
        self._client = _Client(location)

    def version(self, name: str, number: int) -> RegisteredVersion:
        """One version by its number.

        Raises:
            RegistryError: there is none.
        """
        held = {version.number: version for version in self.versions(name)}
        if number not in held:
            raise RegistryError(
                f"{name} version {number} is not in the registry, which has "
                f"{', '.join(map(str, sorted(held))) or 'no version'} of it; it was deleted, or "
                "the registry is another one than that which gave the number"
            )
        return held[number]

    def confirmed(self, ref: ModelVersionRef) -> RegisteredVersion:
        """The registered version that `ref` names.

        Raises:
            RegistryError: it is gone, or its tags tell of another model than `ref`.
        """
        version = self.version(ref.name, ref.version)
        if version.ref != ref:
            raise RegistryError(
                f"{version} in the registry is of program {version.ref.program_sha256[:12]} and "
                f"run {version.run_id}, the reference names {ref.program_sha256[:12]} and "
                f"{ref.run_id}; they are of different registries, or a tag was edited. Nothing "
                "was changed; register the model again"
            )
        return version

    def versions(self, name: str, tags: Mapping[str, str] | None = None) -> list[RegisteredVersion]:
        """All versions of a model that bear these tags, oldest first."""
        wanted = [f"name = '{name}'", *(f"tags.{k} = '{v}'" for k, v in (tags or {}).items())]
        found = self._client.search_model_versions(" and ".join(wanted))
        return sorted(map(self._known, found), key=lambda version: version.number)

    def names(self) -> list[str]:
        """Registered models, by name."""
        return sorted(model.name for model in self._client.search_registered_models())

    def by_alias(self, name: str, alias: str) -> RegisteredVersion | None:
        """The version that an alias points at, None where there is no such alias or model.

        Raises:
            SignatureError: it is the champion, and what was signed at its promotion is another.
        """
        version = self.pointed_at(name, alias)
        if version is not None and alias == CHAMPION:
            _check_promoted(version.state, version.subject, version.tags.get(MANIFEST_TAG, ""))
        return version

    def pointed_at(self, name: str, alias: str) -> RegisteredVersion | None:
        """As `by_alias`, whoever moved the alias: to look at it, or to move it."""
        number = self.aliases(name).get(alias)
        return None if number is None else self.version(name, number)

    def aliases(self, name: str) -> dict[str, int]:
        """All aliases of a model with the versions that they point at."""
        model = self._model(name)
        return {a: int(number) for a, number in model.aliases.items()} if model else {}

    def owner(self, name: str) -> str | None:
        """Use case that a model name belongs to, None where nobody claimed it."""
        model = self._model(name)
        return model.tags.get(OWNER_TAG) if model else None

    def set_owner(self, name: str, use_case: str) -> None:
        """Note whose a model name is; the model is created, without a version, where it is new."""
        if self._model(name):
            self._client.set_registered_model_tag(name, OWNER_TAG, use_case)
        else:
            self._client.create_registered_model(name, tags={OWNER_TAG: use_case})

    def set_alias(self, version: RegisteredVersion, alias: str) -> None:
        """Point an alias at a version, in one transaction; does nothing where it already is."""
        before = self.aliases(version.name).get(alias)
        if before != version.number:
            self._client.set_registered_model_alias(version.name, alias, str(version.number))
            moved = {
                "to": str(version),
                "before": f"{version.name} version {before}" if before else "none",
            }
            self.record("move-alias", version.name, alias=alias, **moved)

    def remove_alias(self, name: str, alias: str) -> None:
        """Let an alias point at nothing; does nothing where there is none."""
        if alias in self.aliases(name):
            self._client.delete_registered_model_alias(name, alias)
            self.record("move-alias", name, alias=alias, to="none")

    def why_withdrawn(self, version: RegisteredVersion) -> str | None:
        """Why a version must never serve, or the one that it was made from; None where it may."""
        while True:
            if reason := version.tags.get(WITHDRAWN_TAG):
                return f"version {version.number} was withdrawn: {reason}"
            made_from = next(filter(None, map(version.tags.get, MADE_FROM_TAGS)), None)
            if made_from is None or int(made_from) >= version.number:
                return None
            version = self.version(version.name, int(made_from))

    def set_tags(self, version: RegisteredVersion, tags: Mapping[str, str]) -> None:
        """Set those tags of a version that are not yet so."""
        changed = {k: value for k, value in tags.items() if version.tags.get(k) != value}
        for key, value in changed.items():
            self._client.set_model_version_tag(version.name, str(version.number), key, value)
        if changed:
            self.record("tag-version", version.name, version=str(version), tags=sorted(changed))

    def record(self, action: str, name: str, outcome: str = "ok", **subject: Any) -> None:
        """Say in the journal what was done to a model."""
        if self.location.home is not None:
            subject = {"model": name, **subject}
            Journal(self.location.home / "audit").append(action, outcome=outcome, subject=subject)

    def add_version(
        self, name: str, run: StartedRun, tags: Mapping[str, str], description: str
    ) -> RegisteredVersion:
        """Sign a run's model folder and make it a new version, tags included, in one transaction.

        Raises:
            SignatureError: the key is not trusted here.
        """
        if may_adopt(self.state):
            for earlier in (v for known in self.names() for v in self.versions(known)):
                adopt(earlier)
            signing.sign(self.state, ADOPTED, {ADOPTED: hashlib.sha256().hexdigest()})
        folder, subject = run.folder / MODEL_FOLDER, f"models/{name}/{run.run_id}"
        signed = signing.digests(folder, (path.name for path in folder.iterdir()))
        signing.sign(self.state, subject, signed, folder / f"{MANIFEST_FILE}{signing.END}")
        if not self._model(name):
            self._client.create_registered_model(name)
        send(run.folder)
        source = self.location.address(folder)
        made = self._client.create_model_version(
            name, source, run.run_id, tags=dict(tags), description=description
        )
        known = self._known(made)
        self.record("register-version", name, version=str(known))
        return known

    def start_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> StartedRun:
        """Begin a run; the experiment is created where there is none."""
        known = self._client.get_experiment_by_name(experiment)
        folder = f"{connection.ADDRESS}{experiment}"
        number = known and known.experiment_id
        number = number or self._client.create_experiment(experiment, artifact_location=folder)
        run = self._client.create_run(number, tags=dict(tags), run_name=name)
        return StartedRun(run.info.run_id, self.location.local_path(run.info.artifact_uri))

    def keep(self, version: RegisteredVersion, path: str, value: Contract) -> str:
        """Keep a value as a file among those of a version's run; returns its SHA-256.

        Args:
            version: whose run.
            path: in the run's folder; `{}` stands for the first 12 digits of the digest.
            value: to be kept.

        Raises:
            StorageError: the disk refused.
        """
        text = value.model_dump_json(indent=1) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        put(self.run_folder(version.run_id) / path.format(digest[:12]), text)
        return digest

    def run_folder(self, run_id: str) -> Path:
        """Local folder of a run's files."""
        return self.location.local_path(self._client.get_run(run_id).info.artifact_uri)

    def log(
        self, run_id: str, parameters: Mapping[str, str], metrics: Sequence[MetricPoint]
    ) -> None:
        """Write parameters and metrics of a run; long parameter values are cut by MLflow."""
        from mlflow.entities import Metric, Param

        now_ms = int(time.time() * 1000)
        params = [Param(key, value) for key, value in parameters.items()]
        points = [Metric(m.name, m.value, now_ms, m.step) for m in metrics]
        for start in range(0, len(params), _MAX_PARAMETERS):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMETERS])
        for start in range(0, len(points), _MAX_METRICS):
            self._client.log_batch(run_id, metrics=points[start : start + _MAX_METRICS])

    def end_run(self, run_id: str, status: str = "FINISHED") -> None:
        """End a run as `FINISHED`, `FAILED` or `KILLED`; one that has ended stays as it is."""
        if self._client.get_run(run_id).info.status == "RUNNING":
            self._client.set_terminated(run_id, status)

    def runs_by_tag(self, experiment: str, tags: Mapping[str, str], by: str) -> dict[str, RunState]:
        """Runs of an experiment that bear `tags`, by the value of the tag `by`."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        return {
            run.data.tags[by]: RunState(run.info.run_id, run.info.status != "RUNNING")
            for run in self._runs(experiment, wanted)
            if by in run.data.tags
        }

    def _runs(self, experiment: str, wanted: str) -> list[Run]:
        known = self._client.get_experiment_by_name(experiment)
        found: list[Run] = []
        token = None if known else ""
        while token != "":
            page = self._client.search_runs(
                [known.experiment_id], filter_string=wanted, page_token=token
            )
            found += page
            token = page.token or ""
        return found

    def discard_run(self, run_id: str, reason: str) -> None:
        """Mark a run failed and deleted, and remove its files."""
        folder = self.location.local_path(self._client.get_run(run_id).info.artifact_uri)
        if folder.parent.name == run_id:  # MLflow's own layout: <experiment>/<run>/artifacts
            drop(folder.parent)
        self._client.set_tag(run_id, "discarded_because", reason)
        self._client.set_terminated(run_id, "FAILED")
        self._client.delete_run(run_id)

    def unfinished_runs(self, experiment: str) -> list[str]:
        """Ids of the runs of this pipeline that are neither finished nor deleted."""
        runs = self._runs(experiment, "attributes.status != 'FINISHED'")
        return [run.info.run_id for run in runs if PROGRAM_TAG in run.data.tags]

    def _model(self, name: str) -> RegisteredModel | None:
        models = self._client.search_registered_models(f"name = '{name}'")
        return models[0] if models else None

    def _known(self, version: ModelVersion) -> RegisteredVersion:
        return RegisteredVersion(
            name=version.name,
            number=int(version.version),
            run_id=version.run_id or "",
            folder=self.location.local_path(version.source or ""),
            tags=dict(version.tags),
            state=self.state,
            created=datetime.fromtimestamp(version.creation_timestamp / 1000, UTC),
        )


@cache
def _check_promoted(state: Path, subject: str, manifest_sha256: str) -> None:
    """Once a process where it holds: servers ask for the champion every few seconds."""
    signing.check_record(state, f"promotions/{subject}", {MANIFEST_FILE: manifest_sha256})


@contextmanager
def held_registry(location: connection.RegistryLocation) -> Iterator[Registry]:
    """The registry, and nobody else changes it meanwhile; see `exclusive`."""
    registry = Registry(location)
    with connection.exclusive(location):
        yield registry
