"""Checkpoints of one run: written complete or not at all, verified by digest on load.

A checkpoint is a folder with a file of each rank that holds some of the state, and a manifest with
the files' SHA-256. The manifest is written last, so nothing counts before all is there; that holds
on a disk and on S3.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Self

from tasks.kernel.errors import ArtifactError, FalajError, StorageError
from tasks.training.checkpoints.access import S3Access, read_access
from tasks.training.checkpoints.config import CheckpointConfig
from tasks.training.checkpoints.location import Location, S3Location
from tasks.training.checkpoints.state import (
    State,
    checked,
    deserialized,
    joined,
    own_rows,
    to_host,
)
from tasks.training.strategies.base import Communicator

LOGGER = logging.getLogger(__name__)
FORMAT = 2
MANIFEST_NAME = "manifest.json"
FOLDER_PATTERN = re.compile(r"state-(\d{5,9})-(\d{9,15})-[0-9a-f]{8}")
NUM_KEPT = 2
"""Complete checkpoints that are kept: the second is there should the first be damaged."""


class CheckpointRef(NamedTuple):
    """Names one checkpoint of a store; the newest is the largest.

    `epoch` and `step` say where training resumes: step 0 follows the end of the epoch before.
    """

    epoch: int
    step: int
    name: str

    @classmethod
    def new(cls, epoch: int, step: int) -> Self:
        """The reference of a checkpoint that is about to be written, like no other."""
        return cls(epoch, step, f"state-{epoch:05d}-{step:09d}-{secrets.token_hex(4)}")

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The reference of a folder's name; None where it is no checkpoint's."""
        match = FOLDER_PATTERN.fullmatch(name)
        return cls(int(match[1]), int(match[2]), name) if match else None

    def __str__(self) -> str:
        return f"{self.name} (epoch {self.epoch}, step {self.step})"


class CheckpointStore:
    """Writes, finds, verifies, loads and prunes checkpoints.

    One process of a run writes at a time, or all ranks together; any process may read.

    Args:
        location: where the files are; holds checkpoints of this run alone.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._known_complete: set[str] = set()

    def __str__(self) -> str:
        return str(self._location)

    def newest(self) -> CheckpointRef | None:
        """The newest complete checkpoint, every byte of it verified; None where there is none.

        Incomplete and damaged ones are passed over with a warning.

        Raises:
            TransientError: the store does not answer.
            StorageError: the store refuses.
        """
        files = self._location.list_files()
        for name in sorted({name.partition("/")[0] for name in files} - _complete(files)):
            LOGGER.warning("%s in %s is no complete checkpoint: passed over", name, self)
        for ref in _refs(files):
            try:
                self._verify(ref)
            except ArtifactError as exc:
                LOGGER.warning("%s", exc)
            else:
                return ref
        return None

    def load(self, ref: CheckpointRef) -> State:
        """The state that was saved, on the CPU; nothing that was read is run.

        Raises:
            ArtifactError: the checkpoint is incomplete or damaged.
            TransientError: the store does not answer.
            StorageError: the store refuses.
        """
        try:
            state: State = joined([deserialized(content) for content in self._read(ref)])
        except ArtifactError as exc:
            raise self._damaged(ref, exc) from exc
        return state

    def save(self, epoch: int, step: int, state: Mapping[str, Any]) -> CheckpointRef:
        """Write a state; training resumes from (epoch, step).

        Raises:
            StorageError: the write was refused; earlier checkpoints are untouched.
            TransientError: the store does not answer.
            TrainingError: the state holds what a checkpoint cannot hold.
        """
        ref = CheckpointRef.new(epoch, step)
        self.finish(ref, [self.write_file(ref, to_host(state, copy=False))])
        return ref

    def write_file(self, ref: CheckpointRef, state: Mapping[str, Any], rank: int = 0) -> str:
        """Write one rank's file of a checkpoint, which counts when `finish` is done.

        Args:
            ref: the same for all ranks.
            state: from `to_host`; of ranks but the first `own_rows` of it.
            rank: which rank this is.

        Returns:
            The file's SHA-256.

        Raises:
            StorageError, TransientError, TrainingError: as `save`.
        """
        content = checked(state)
        self._location.write(f"{ref.name}/{_file_name(rank)}", content)
        return hashlib.sha256(content).hexdigest()

    def finish(self, ref: CheckpointRef, digests: Sequence[str]) -> None:
        """Write the manifest of all ranks' files: from now on the checkpoint counts.

        Raises:
            StorageError, TransientError: as `save`.
        """
        manifest = json.dumps({"format": FORMAT, "sha256": digests})
        self._location.write(f"{ref.name}/{MANIFEST_NAME}", manifest.encode())
        self._known_complete.add(ref.name)

    def prune(self, num_kept: int) -> None:
        """Remove all but the newest `num_kept` complete checkpoints, and incomplete ones.

        One that is damaged does not count, so the last complete one stays.

        Raises:
            StorageError, TransientError: as `save`.
        """
        files = self._location.list_files()
        kept: set[str] = set()
        for ref in _refs(files):
            if len(kept) < num_kept and self._is_complete(ref):
                kept.add(ref.name)
        # Where none is complete, all that is left is evidence.
        self._remove(_folders(files) - (kept or _complete(files)))

    def clear(self) -> None:
        """Remove all checkpoints of the run; for when its result is published.

        Raises:
            StorageError, TransientError: as `save`.
        """
        self._remove(_folders(self._location.list_files()))

    def _remove(self, folders: Set[str]) -> None:
        for folder in sorted(folders):
            self._location.remove(folder, MANIFEST_NAME)

    def _is_complete(self, ref: CheckpointRef) -> bool:
        try:
            self._verify(ref)
        except ArtifactError:
            return False
        return True

    def _verify(self, ref: CheckpointRef) -> None:
        """Read all files; once in a process, and never those that it wrote itself."""
        if ref.name in self._known_complete:
            return
        try:
            self._read(ref)
        except ArtifactError as exc:
            raise self._damaged(ref, exc) from exc
        self._known_complete.add(ref.name)

    def _read(self, ref: CheckpointRef) -> list[bytes]:
        """The content of each rank's file."""
        try:
            digests = _digests(self._location.read(f"{ref.name}/{MANIFEST_NAME}"))
            contents = [
                self._location.read(f"{ref.name}/{_file_name(rank)}")
                for rank in range(len(digests))
            ]
        except OSError as exc:
            raise ArtifactError(f"it cannot be read ({exc.strerror or exc})") from exc
        for rank, (content, expected) in enumerate(zip(contents, digests, strict=True)):
            if (seen := hashlib.sha256(content).hexdigest()) != expected:
                raise ArtifactError(
                    f"{_file_name(rank)} has SHA-256 {seen[:12]}, expected {expected[:12]}"
                )
        return contents

    def _damaged(self, ref: CheckpointRef, reason: ArtifactError) -> ArtifactError:
        return ArtifactError(
            f"checkpoint {ref} in {self} is incomplete or damaged: {reason}. It does not count; "
            "training resumes from the one before"
        )


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _digests(manifest: bytes) -> list[str]:
    """SHA-256 of each rank's file."""
    try:
        content = json.loads(manifest)
        found, digests = content["format"], content["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ArtifactError(f"{MANIFEST_NAME} is no manifest ({exc!r})") from exc
    if found != FORMAT or not digests or not isinstance(digests, list):
        raise ArtifactError(f"its format is {found!r}, expected {FORMAT}")
    return [str(digest) for digest in digests]


def _folders(files: Set[str]) -> set[str]:
    """Folders with the name of a checkpoint, complete or not."""
    tops = {name.partition("/")[0] for name in files if "/" in name}
    return {name for name in tops if CheckpointRef.parse(name)}


def _complete(files: Set[str]) -> set[str]:
    """Checkpoints with a manifest."""
    return {name for name in _folders(files) if f"{name}/{MANIFEST_NAME}" in files}


def _refs(files: Set[str]) -> list[CheckpointRef]:
    """Checkpoints with a manifest, the newest first."""
    return sorted(filter(None, map(CheckpointRef.parse, _complete(files))), reverse=True)


def open_store(
    config: CheckpointConfig, run_path: Path, environment: Mapping[str, str] | None = None
) -> CheckpointStore:
    """The store of the run whose directory is `run_path`.

    Each run has a folder of its own, named as its directory, below what the configuration names.

    Args:
        config: where checkpoints are.
        run_path: the run directory.
        environment: the driver's, with its keys for S3. None on ranks, which have the driver's
            file, see `access.py`.

    Raises:
        ConfigurationError: the keys for S3 are not there, or only one half of them.
    """
    if config.bucket_and_prefix:
        access = read_access(run_path) if environment is None else S3Access.of_driver(environment)
        return CheckpointStore(S3Location(f"{config.bucket_and_prefix}/{run_path.name}", access))
    if config.local_folder:
        return CheckpointStore(Location(Path(config.local_folder) / run_path.name))
    return CheckpointStore(Location(run_path / "checkpoints"))


def agreed_newest(store: CheckpointStore, ranks: Communicator) -> CheckpointRef | None:
    """The newest complete checkpoint, which rank 0 looks for; the same on all ranks. Collective.

    Raises:
        TransientError, StorageError: on rank 0, as `CheckpointStore.newest`.
    """
    found = store.newest() if ranks.rank == 0 else None
    return CheckpointRef.parse(str(ranks.gather_values(found.name if found else "")[0]))


def save_by_ranks(
    store: CheckpointStore,
    ranks: Communicator,
    epoch: int,
    step: int,
    state: Mapping[str, Any],
    num_kept: int = NUM_KEPT,
) -> CheckpointRef:
    """Write a state of which each rank holds some, and prune. Collective; returns when it is done.

    Args:
        store: in a location that all ranks reach.
        ranks: all of them.
        epoch: where training resumes.
        step: likewise.
        state: rank 0's is written; of the others' the tensors that are given as `TensorRows`.
        num_kept: complete checkpoints to keep.

    Raises:
        StorageError: a rank's write failed; raised on all ranks, the error names the one.
            Earlier checkpoints are untouched.
    """
    ref = CheckpointRef.parse(str(ranks.gather_values(CheckpointRef.new(epoch, step).name)[0]))
    assert ref  # what rank 0 has just named
    own = to_host(state, copy=False)
    own = own_rows(own) if ranks.rank else own
    digests = _on_all_ranks(ranks, lambda: store.write_file(ref, own, ranks.rank))

    def finish() -> None:
        if ranks.rank == 0:
            store.finish(ref, digests)
            store.prune(num_kept)

    _on_all_ranks(ranks, finish)
    return ref


def _on_all_ranks(ranks: Communicator, action: Callable[[], object]) -> list[Any]:
    """What each rank's `action` returned, in rank order; an error of one is raised on all."""
    try:
        report = {"result": action()}
    except FalajError as exc:
        report = {"error": f"{type(exc).__name__}: {exc}"}
    reports: list[Any] = ranks.gather_values(report)
    for rank, of_rank in enumerate(reports):
        if "error" in of_rank:
            raise StorageError(f"the checkpoint of rank {rank} failed: {of_rank['error']}")
    return [of_rank["result"] for of_rank in reports]
