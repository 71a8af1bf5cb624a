"""Checkpoints of one run: written complete or not at all, verified by digest on load.

A checkpoint is a folder with the state, a file of `torch.save` that is loaded without running any
code, and a manifest with its SHA-256. The manifest is written last, so nothing counts before all is
there; that holds on a disk and on S3.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tasks.kernel.errors import ArtifactError, TrainingError
from tasks.kernel.location import Location
from tasks.training.checkpoints.disk import Disk
from tasks.training.config import CheckpointConfig

if TYPE_CHECKING:  # whoever starts ranks needs no PyTorch
    from torch import Tensor

    from tasks.training.strategies.base import Communicator, State

LOGGER = logging.getLogger(__name__)
FORMAT = 3
STATE_NAME = "state.pt"
MANIFEST_NAME = "manifest.json"
NUM_KEPT = 2
"""Complete checkpoints that are kept: the second is there should the first be damaged."""


def to_host(value: Any, *, copy: bool, known: dict[int, Tensor] | None = None) -> Any:
    """The same in host memory, with containers that nobody else changes.

    Args:
        value: a state, or what is in one.
        copy: tensors that nobody else changes too.
        known: tensors that were met before; one that is in the state twice is copied once.
    """
    from torch import Tensor

    known = {} if known is None else known
    if isinstance(value, Tensor):
        if id(value) not in known:
            # A file of `torch.save` holds all of what a view is of.
            is_view = value.nbytes < value.untyped_storage().nbytes()
            known[id(value)] = value.detach().to("cpu", copy=copy or is_view)
        return known[id(value)]
    if isinstance(value, Mapping):
        return {key: to_host(item, copy=copy, known=known) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(to_host(item, copy=copy, known=known) for item in value)
    return value


def serialized(state: Mapping[str, Any]) -> bytes:
    """The content of a file of `torch.save`.

    In memory first: torch reports a full disk as a RuntimeError without a reason.
    """
    import torch

    content = io.BytesIO()
    torch.save(dict(state), content)
    return content.getvalue()


def checked(state: Mapping[str, Any]) -> bytes:
    """As `serialized`, of what can be loaded again without running code.

    Raises:
        TrainingError: the state holds something else.
    """
    import torch

    try:
        content = serialized(state)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as exc:
        unsafe = [str(exc)]
    if unsafe:
        raise TrainingError(
            "the training state holds what a checkpoint must not hold; expected tensors, numbers, "
            "text, None, and dicts, lists and tuples of them. No checkpoint was written "
            f"({', '.join(unsafe)})"
        )
    return content


def deserialized(content: bytes) -> Any:
    """What `checked` was given; no code is run.

    Raises:
        ArtifactError: it is something else.
    """
    import torch

    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else repr(exc)
        raise ArtifactError(f"it cannot be loaded ({reason})") from exc


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
        match = re.fullmatch(r"state-(\d{5,9})-(\d{9,15})-[0-9a-f]{8}", name)
        return cls(int(match[1]), int(match[2]), name) if match else None

    def __str__(self) -> str:
        return f"{self.name} (epoch {self.epoch}, step {self.step})"


class CheckpointStore:
    """Writes, finds, verifies, loads and prunes checkpoints.

    One process of a run writes at a time; any process may read.

    Args:
        location: where the files are; holds checkpoints of this run alone.
    """

    def __init__(self, location: Location | Disk) -> None:
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
        files = self._files()
        for name in sorted({name.partition("/")[0] for name in files} - _complete(files)):
            LOGGER.warning("%s in %s is no complete checkpoint: passed over", name, self)
        return next(self._whole(files), None)

    def load(self, ref: CheckpointRef) -> State:
        """The state that was saved, on the CPU; nothing that was read is run.

        Raises:
            ArtifactError: the checkpoint is incomplete or damaged.
            TransientError: the store does not answer.
            StorageError: the store refuses.
        """
        with self._damage_explained(ref):
            state: State = deserialized(self._read(ref))
        return state

    def save(self, epoch: int, step: int, state: Mapping[str, Any]) -> CheckpointRef:
        """Write a state (plain values and tensors); training resumes from (epoch, step).

        Raises:
            StorageError: the write was refused; earlier checkpoints are untouched.
            TransientError: the store does not answer.
            TrainingError: the state holds what a checkpoint cannot hold.
        """
        ref = CheckpointRef.new(epoch, step)
        content = checked(to_host(state, copy=False))
        self._location.write(f"{ref.name}/{STATE_NAME}", content)
        manifest = {"format": FORMAT, "sha256": hashlib.sha256(content).hexdigest()}
        self._location.write(f"{ref.name}/{MANIFEST_NAME}", json.dumps(manifest).encode())
        self._known_complete.add(ref.name)
        return ref

    def prune(self, num_kept: int) -> None:
        """Remove all but the newest `num_kept` complete checkpoints, and incomplete ones.

        One that is damaged does not count, so the last complete one stays.

        Raises:
            StorageError, TransientError: as `save`.
        """
        files = self._files()
        kept = {ref.name for ref in islice(self._whole(files), num_kept)}
        # Where none is complete, all that is left is evidence.
        self._remove(files, _folders(files) - (kept or _complete(files)))

    def clear(self) -> None:
        """Remove all checkpoints of the run; for when its result is published.

        Raises:
            StorageError, TransientError: as `save`.
        """
        files = self._files()
        self._remove(files, _folders(files))

    def _files(self) -> set[str]:
        return set(self._location.entries(""))

    def _remove(self, files: Set[str], folders: Set[str]) -> None:
        """Each one's manifest first, and on a disk the folder itself last."""
        for folder in sorted(folders):
            names = (name for name in files if name.startswith(f"{folder}/"))
            longest_first = sorted(names, key=len, reverse=True)
            self._location.remove(sorted(longest_first, key=f"{folder}/{MANIFEST_NAME}".__ne__))

    def _whole(self, files: Set[str]) -> Iterator[CheckpointRef]:
        """Verified checkpoints, the newest first; a damaged one is logged."""
        for ref in sorted(filter(None, map(CheckpointRef.parse, _complete(files))), reverse=True):
            try:
                self._verify(ref)
            except ArtifactError as exc:
                LOGGER.warning("%s", exc)
            else:
                yield ref

    def _verify(self, ref: CheckpointRef) -> None:
        """Read the files; once in a process, and never those that it wrote itself."""
        if ref.name in self._known_complete:
            return
        with self._damage_explained(ref):
            self._read(ref)
        self._known_complete.add(ref.name)

    def _read(self, ref: CheckpointRef) -> bytes:
        """The content of the state's file."""
        expected = _digest(self._file(ref, MANIFEST_NAME))
        content = self._file(ref, STATE_NAME)
        if (seen := hashlib.sha256(content).hexdigest()) != expected:
            raise ArtifactError(
                f"{STATE_NAME} has SHA-256 {seen[:12]}, expected {str(expected)[:12]}"
            )
        return content

    def _file(self, ref: CheckpointRef, name: str) -> bytes:
        content = self._location.read(f"{ref.name}/{name}")
        if content is None:
            raise ArtifactError(f"it lacks {name}")
        return content

    @contextmanager
    def _damage_explained(self, ref: CheckpointRef) -> Iterator[None]:
        try:
            yield
        except ArtifactError as exc:
            raise ArtifactError(
                f"checkpoint {ref} in {self} is incomplete or damaged: {exc}. It does not count; "
                "training resumes from the one before"
            ) from exc


def _digest(manifest: bytes) -> object:
    """SHA-256 of the state's file."""
    try:
        content = json.loads(manifest)
        found, digest = content["format"], content["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ArtifactError(f"{MANIFEST_NAME} is no manifest ({exc!r})") from exc
    if found != FORMAT:
        raise ArtifactError(f"its format is {found!r}, expected {FORMAT}")
    return digest


def _folders(files: Set[str]) -> set[str]:
    """Folders with the name of a checkpoint, complete or not."""
    tops = {name.partition("/")[0] for name in files if "/" in name}
    return {name for name in tops if CheckpointRef.parse(name)}


def _complete(files: Set[str]) -> set[str]:
    """Checkpoints with a manifest."""
    return {name for name in _folders(files) if f"{name}/{MANIFEST_NAME}" in files}


def open_store(
    config: CheckpointConfig, run_path: Path, reach: Callable[[str], Location] = Location
) -> CheckpointStore:
    """The store of the run whose directory is `run_path`.

    Each run has a folder of its own, named as its directory, below what the configuration names.

    Args:
        config: where checkpoints are.
        run_path: the run directory.
        reach: gives the location of a URL of S3; on ranks `RunDirectory.location`.

    Raises:
        ConfigurationError: the access to S3 is not there, or only one half of its keys.
    """
    if config.is_on_s3:
        return CheckpointStore(reach(f"{config.uri.rstrip('/')}/{run_path.name}"))
    if config.local_folder:
        return CheckpointStore(Disk(Path(config.local_folder) / run_path.name))
    return CheckpointStore(Disk(run_path / "checkpoints"))


def agreed_newest(store: CheckpointStore, ranks: Communicator) -> CheckpointRef | None:
    """The newest complete checkpoint, which rank 0 looks for; the same on all ranks. Collective.

    Raises:
        TransientError, StorageError: on rank 0, as `CheckpointStore.newest`.
    """
    found = store.newest() if ranks.rank == 0 else None
    return CheckpointRef.parse(str(ranks.gather_values(found.name if found else "")[0]))
