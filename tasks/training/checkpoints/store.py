"""Checkpoints of one run in a place: written whole or not at all, verified by digest on load.

A checkpoint is a folder of parts and a manifest that names them with sizes and SHA-256. The
manifest is written last, so nothing counts before all is there; that holds on a disk and on S3.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tasks.kernel.errors import ArtifactError, StorageError, TrainingError, TransientError
from tasks.training.checkpoints.config import CheckpointConfig
from tasks.training.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointRef,
    Manifest,
    Section,
)
from tasks.training.checkpoints.parts import (
    PartContent,
    PartReader,
    empty_tensors,
    plan_parts,
    targets_by_part,
    written_tensors,
)
from tasks.training.checkpoints.places import LocalPlace, Place
from tasks.training.checkpoints.state import (
    PLAIN_KEYS,
    Keys,
    Leaf,
    State,
    TakenApart,
    is_named,
    plain_from_bytes,
    plain_to_bytes,
    put_together,
    take_apart,
)

LOGGER = logging.getLogger(__name__)
NUM_KEPT = 2
"""Whole checkpoints that are kept: the second is there should the first be damaged."""
SHARD_BYTES = 512 << 20
"""Small enough to be uploaded again, large enough that a state of gigabytes has few files."""


class CheckpointStore:
    """Writes, finds, verifies, loads and prunes checkpoints.

    One process of a run writes at a time, in any of its threads (or all ranks together, see
    `ranks.py`); any process may read.

    Args:
        place: where the files are; holds checkpoints of this run alone.
        shard_bytes: a larger checkpoint is cut into parts of at most so many bytes of tensors.
    """

    def __init__(self, place: Place, shard_bytes: int = SHARD_BYTES) -> None:
        self._place = place
        self._shard_bytes = shard_bytes
        self._known_whole: set[str] = set()
        self._being_written: set[str] = set()

    def __str__(self) -> str:
        return str(self._place)

    def newest(self) -> CheckpointRef | None:
        """The newest whole checkpoint, every byte of it verified; None where there is none.

        Incomplete and damaged ones are passed over with a warning.

        Raises:
            TransientError: the store does not answer.
            StorageError: the store refuses.
        """
        files = self._place.list_files()
        self._warn_of_strangers(files)
        for ref in _refs(files):
            try:
                self._read(ref, names=())
            except ArtifactError as exc:
                LOGGER.warning("%s", exc)
                continue
            self._known_whole.add(ref.name)
            return ref
        return None

    def load(self, ref: CheckpointRef, names: Collection[str] | None = None) -> State:
        """The state that was saved, on the CPU; nothing that was read is run.

        Needs the memory of the tensors that are asked for, and no more.

        Args:
            ref: of `newest`, or of a rank that called it.
            names: load only these tensors and those below, such as "network" or
                "optimizer/perceptron.0.weight"; others are left out. None: all.

        Raises:
            ArtifactError: the checkpoint is incomplete or damaged.
            TransientError: the store does not answer.
            StorageError: the store refuses.
        """
        return self._read(ref, names, only_verify=False)

    def save(self, epoch: int, step: int, state: Mapping[str, Any]) -> CheckpointRef:
        """Write a state, which must not change meanwhile; training goes on from (epoch, step).

        Raises:
            StorageError: the write was refused; earlier checkpoints are untouched.
            TransientError: the store does not answer.
            TrainingError: the state holds what a checkpoint cannot hold.
        """
        return self.save_taken_apart(epoch, step, take_apart(state))

    def save_taken_apart(self, epoch: int, step: int, state: TakenApart) -> CheckpointRef:
        """As `save`."""
        ref = CheckpointRef.new(epoch, step)
        with self.being_written(ref):
            self.finish(ref, [self.write_section(ref, state)], state.plain)
        return ref

    def write_section(self, ref: CheckpointRef, state: TakenApart, rank: int = 0) -> Section:
        """Write one rank's parts of a checkpoint; they count when `finish` is done.

        Args:
            ref: the same for all ranks.
            state: this rank's share; the plain part of rank 0 is the one that is kept.
            rank: which rank this is.

        Raises:
            StorageError, TransientError, TrainingError: as `save`.
        """
        tensors: dict[Keys, Leaf] = dict(state.tensors)
        if rank == 0:
            plain = bytearray(plain_to_bytes(state.plain))
            tensors = {PLAIN_KEYS: torch.frombuffer(plain, dtype=torch.uint8), **tensors}
        plans = plan_parts(tensors, self._shard_bytes)
        parts = []
        for number, plan in enumerate(plans):
            name, content = f"part-{rank:05d}-{number:05d}.safetensors", PartContent(plan)
            self._place.write(f"{ref.name}/{name}", content.chunks())
            parts.append(content.part(name))
        return Section(parts=tuple(parts), tensors=written_tensors(tensors, plans))

    def finish(self, ref: CheckpointRef, sections: Sequence[Section], plain: Any) -> None:
        """Write the manifest of all that the ranks wrote: from now on the checkpoint counts.

        Args:
            ref: as it was given to `write_section`.
            sections: what each rank's `write_section` returned, in any order.
            plain: the plain part of rank 0's state.

        Raises:
            TrainingError: the ranks' sections do not make a whole state.
            StorageError, TransientError: as `save`.
        """
        try:
            manifest = Manifest.of(ref, sections)
            put_together(plain, {r.keys: None for r in manifest.tensors if r.keys != PLAIN_KEYS})
        except (ValidationError, ArtifactError) as exc:
            reason = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else str(exc)
            raise TrainingError(
                f"the ranks' parts of checkpoint {ref} do not make a whole: {reason}; expected "
                "each element of each tensor once. It was dropped, earlier ones are untouched"
            ) from exc
        self._place.write(f"{ref.name}/{MANIFEST_NAME}", [memoryview(manifest.to_bytes())])
        self._known_whole.add(ref.name)

    @contextmanager
    def being_written(self, ref: CheckpointRef) -> Iterator[None]:
        """Keep what is written of a checkpoint from being pruned; drop it where the block fails."""
        self._being_written.add(ref.name)
        try:
            yield
        except (StorageError, TransientError, TrainingError):
            try:
                self._place.remove(ref.name)
            except (StorageError, TransientError) as exc:
                LOGGER.debug("what was written of %s stays until the next one: %s", ref, exc)
            raise
        finally:
            self._being_written.discard(ref.name)

    def prune(self, num_kept: int) -> None:
        """Remove all but the newest `num_kept` whole checkpoints, and what never became whole.

        One that is damaged does not count, so the last whole one stays. One that is being read
        stays too, where the place can know.

        Raises:
            StorageError, TransientError: as `save`.
        """
        being_written = set(self._being_written)  # before the listing: what ends meanwhile stays
        files = self._place.list_files()
        kept: set[str] = set()
        for ref in _refs(files):
            if len(kept) < num_kept and self._is_whole(ref):
                kept.add(ref.name)
        with_manifest = {ref.name for ref in _refs(files)}
        spared = kept or with_manifest  # where none is whole, all that is left is evidence
        for folder in sorted(_folders(files) - spared - being_written - self._being_written):
            if not self._place.remove(folder):
                LOGGER.debug("%s is being read and stays until the next checkpoint", folder)

    def clear(self) -> None:
        """Remove all checkpoints of the run; for when its result is published.

        Raises:
            StorageError, TransientError: as `save`.
        """
        for folder in _folders(self._place.list_files()):
            self._place.remove(folder)

    def _is_whole(self, ref: CheckpointRef) -> bool:
        """Read once in a process, and never those that it wrote itself."""
        if ref.name not in self._known_whole:
            try:
                self._read(ref, names=())
            except ArtifactError:
                return False
            self._known_whole.add(ref.name)
        return True

    def _read(
        self, ref: CheckpointRef, names: Collection[str] | None, *, only_verify: bool = True
    ) -> State:
        """Load what is named; or, with `only_verify`, read every byte and load nothing."""
        try:
            with self._place.in_use(ref.name):
                manifest = self._manifest(ref)
                tensors = empty_tensors(
                    record for record in manifest.tensors if _is_asked_for(record.keys, names)
                )
                targets = targets_by_part(manifest, tensors)
                for number, part in enumerate(manifest.parts):
                    if only_verify or number in targets:
                        with self._place.open(f"{ref.name}/{part.name}") as stream:
                            reader = PartReader(stream, part)
                            reader.fill(targets.get(number, ()))
                            reader.finish()
                return _state_of(manifest, tensors)
        except FileNotFoundError as exc:
            raise self._damaged(ref, "a file of it is missing") from exc
        except OSError as exc:
            raise self._damaged(ref, f"it cannot be read ({exc.strerror or exc})") from exc
        except ArtifactError as exc:
            raise self._damaged(ref, str(exc)) from exc

    def _damaged(self, ref: CheckpointRef, reason: str) -> ArtifactError:
        return ArtifactError(
            f"checkpoint {ref} in {self._place} is incomplete or damaged: {reason}. It does not "
            "count; training goes on from the one before"
        )

    def _manifest(self, ref: CheckpointRef) -> Manifest:
        with self._place.open(f"{ref.name}/{MANIFEST_NAME}") as stream:
            content = bytearray()
            buffer = memoryview(bytearray(1 << 16))
            while got := stream.readinto(buffer):
                content += buffer[:got]
        manifest = Manifest.from_bytes(bytes(content))
        if (manifest.epoch, manifest.step) != (ref.epoch, ref.step):
            raise ArtifactError(f"{MANIFEST_NAME} is that of another checkpoint")
        return manifest

    def _warn_of_strangers(self, files: Set[str]) -> None:
        whole = {ref.name for ref in _refs(files)}
        tops = {name.partition("/")[0] for name in files}
        for name in sorted(tops - whole):
            if CheckpointRef.parse(name):
                LOGGER.warning("%s in %s has no manifest: incomplete, passed over", name, self)
            else:
                LOGGER.warning(
                    "%s in %s is no checkpoint of this format: passed over and left alone",
                    name,
                    self,
                )


def _folders(files: Set[str]) -> set[str]:
    """Folders with the name of a checkpoint, whole or not."""
    tops = {name.partition("/")[0] for name in files if "/" in name}
    return {name for name in tops if CheckpointRef.parse(name)}


def _refs(files: Set[str]) -> list[CheckpointRef]:
    """Checkpoints with a manifest, the newest first."""
    folders = (
        name.removesuffix(f"/{MANIFEST_NAME}") for name in files if name.endswith(MANIFEST_NAME)
    )
    return sorted((ref for folder in folders if (ref := CheckpointRef.parse(folder))), reverse=True)


def _is_asked_for(keys: Keys, names: Collection[str] | None) -> bool:
    return keys == PLAIN_KEYS or is_named(keys, names)


def _state_of(manifest: Manifest, tensors: dict[Keys, Tensor]) -> State:
    plain = plain_from_bytes(tensors.pop(PLAIN_KEYS).numpy().tobytes())
    absent = {
        record.keys: None
        for record in manifest.tensors
        if record.keys not in tensors and record.keys != PLAIN_KEYS
    }
    return put_together(plain, {**tensors, **absent})


def open_store(
    config: CheckpointConfig, run_path: Path, environment: Mapping[str, str] | None = None
) -> CheckpointStore:
    """The store of the run whose directory is `run_path`.

    Each run has a folder of its own, named as its directory, under a place that the configuration
    names.

    Args:
        config: where checkpoints are.
        run_path: the run directory.
        environment: the driver's, with its keys for S3. None on ranks, which have the driver's
            file, see `access.py`.

    Raises:
        ConfigurationError: the keys for S3 are not there, or only one half of them.
    """
    place: Place
    if config.bucket_and_prefix:
        # Here, since Arrow's S3 client takes a while to load and most runs do without.
        from tasks.training.checkpoints.access import S3Access, read_access
        from tasks.training.checkpoints.places import S3Place

        if environment is None:
            access = read_access(run_path)
        else:
            access = S3Access.of_driver(environment)
        prefix = f"{config.bucket_and_prefix}/{run_path.name}"
        place = S3Place(prefix, access)
    elif config.local_folder:
        place = LocalPlace(Path(config.local_folder) / run_path.name)
    else:
        place = LocalPlace(run_path / "checkpoints")
    return CheckpointStore(place)
