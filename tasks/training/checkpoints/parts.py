"""The files of a checkpoint: tensors in the safetensors format, cut over parts by bytes.

The format is public and has no code in it: eight bytes with the length of a JSON header, the header
(each tensor's kind, shape and place), then the tensors' bytes, row by row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tasks.kernel.errors import ArtifactError
from tasks.training.checkpoints.manifest import Manifest, Part, Piece, WholeTensor, WrittenTensor
from tasks.training.checkpoints.state import (
    DTYPE_NAMES,
    DTYPES,
    Keys,
    Leaf,
    TensorRows,
    name_of,
)

CHUNK_BYTES = 4 << 20
"""Large enough to be quick, small enough to stay in the processor's cache from hash to write."""
HEADER_ALIGNMENT = 8
LENGTH_BYTES = 8


class Reader(Protocol):
    """A file that is read from its beginning to its end."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill as much of `buffer` as possible; the number of bytes, 0 at the end."""


@dataclass(frozen=True)
class Slice:
    """Elements of a tensor that go into one part."""

    keys: Keys
    tensor: Tensor
    """The whole tensor or this rank's rows of it, contiguous, on the CPU."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int
    """Where this rank's first element is in the whole tensor."""
    start: int
    stop: int
    """Elements of `tensor`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return (self.stop - self.start) * self.tensor.itemsize

    @property
    def content(self) -> memoryview:
        """The elements' bytes, not copied."""
        return bytes_of(self.tensor)[self.start * self.tensor.itemsize :][: self.num_bytes]

    @property
    def label(self) -> str:
        """Name in the part's header: the tensor's, and which elements where it is not whole."""
        name = name_of(self.keys)
        return name if self.is_whole else f"{name}[{self.first + self.start}:{self._last}]"

    @property
    def is_whole(self) -> bool:
        """True where the whole tensor is in this part."""
        return self.stop - self.start == self.tensor.numel() == torch.Size(self.shape).numel()

    @property
    def _last(self) -> int:
        return self.first + self.stop

    def piece(self, part: int, offset: int) -> Piece:
        """The record of the elements, at `offset` of the file of a part."""
        return Piece(part=part, offset=offset, start=self.first + self.start, stop=self._last)


@dataclass
class PartPlan:
    """What goes into one file."""

    slices: list[Slice] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, elements: Slice) -> None:
        """Put elements at the end."""
        self.slices.append(elements)
        self.num_bytes += elements.num_bytes

    def header(self) -> bytes:
        """The length and the header of the file."""
        entries, offset = {}, 0
        for elements in self.slices:
            stop = offset + elements.num_bytes
            entries[elements.label] = {
                "dtype": elements.dtype,
                "shape": elements.shape if elements.is_whole else [elements.stop - elements.start],
                "data_offsets": [offset, stop],
            }
            offset = stop
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text


def plan_parts(tensors: Mapping[Keys, Leaf], shard_bytes: int) -> list[PartPlan]:
    """Cut tensors over parts of at most `shard_bytes`; only a larger tensor is cut itself.

    Args:
        tensors: as `take_apart` gave them; copied to the CPU where they are not on it.
        shard_bytes: at least those of one element.
    """
    plans = [PartPlan()]
    for keys, leaf in tensors.items():
        whole = _whole_slice(keys, leaf)
        start, item_bytes = 0, whole.tensor.itemsize
        if whole.num_bytes <= shard_bytes < plans[-1].num_bytes + whole.num_bytes:
            plans.append(PartPlan())
        while start < whole.stop:
            room = (shard_bytes - plans[-1].num_bytes) // item_bytes
            if room <= 0:
                plans.append(PartPlan())
                continue
            stop = min(whole.stop, start + room)
            plans[-1].add(
                Slice(keys, whole.tensor, whole.dtype, whole.shape, whole.first, start, stop)
            )
            start = stop
    return [plan for plan in plans if plan.slices]


def _whole_slice(keys: Keys, leaf: Leaf) -> Slice:
    values, first = (leaf.values, leaf.start) if isinstance(leaf, TensorRows) else (leaf, 0)
    dtype = DTYPE_NAMES[values.dtype]
    return Slice(
        keys, values.cpu().contiguous(), dtype, tuple(leaf.shape), first, 0, values.numel()
    )


def written_tensors(
    tensors: Mapping[Keys, Leaf], plans: Iterable[PartPlan]
) -> tuple[WrittenTensor, ...]:
    """The record of each tensor, with the pieces that `plans` cut it into."""
    pieces: dict[Keys, list[Piece]] = {keys: [] for keys in tensors}
    for number, plan in enumerate(plans):
        offset = len(plan.header())
        for elements in plan.slices:
            pieces[elements.keys].append(elements.piece(number, offset))
            offset += elements.num_bytes
    return tuple(
        WrittenTensor(
            keys=keys,
            dtype=DTYPE_NAMES[(leaf.values if isinstance(leaf, TensorRows) else leaf).dtype],
            shape=tuple(leaf.shape),
            pieces=tuple(pieces[keys]),
        )
        for keys, leaf in tensors.items()
    )


class PartContent:
    """The bytes of a part, in chunks; its digest and size are known when all were taken."""

    def __init__(self, plan: PartPlan) -> None:
        self._plan = plan
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def chunks(self) -> Iterator[memoryview]:
        """All bytes of the file; to be gone through once."""
        for section in (memoryview(self._plan.header()), *self._contents()):
            for start in range(0, len(section), CHUNK_BYTES):
                chunk = section[start : start + CHUNK_BYTES]
                self._hash.update(chunk)
                self._num_bytes += len(chunk)
                yield chunk

    def _contents(self) -> Iterator[memoryview]:
        return (elements.content for elements in self._plan.slices)

    def part(self, name: str) -> Part:
        """The record of the file, after all chunks."""
        return Part(name=name, num_bytes=self._num_bytes, sha256=self._hash.hexdigest())


@dataclass(frozen=True)
class Target:
    """Where bytes of a part go: from `offset` of the file into `buffer`."""

    offset: int
    buffer: memoryview


class PartReader:
    """Reads one part from beginning to end, into tensors, and checks its digest.

    Nothing that was read counts before `finish` has returned.
    """

    def __init__(self, stream: Reader, part: Part) -> None:
        self._stream = stream
        self._part = part
        self._hash = hashlib.sha256()
        self._position = 0
        self._scratch = memoryview(bytearray(min(CHUNK_BYTES, part.num_bytes + 1)))

    def fill(self, targets: Iterable[Target]) -> None:
        """Fill each buffer; in the order of offsets, which do not overlap.

        Raises:
            ArtifactError: the file ends too early.
        """
        for target in targets:
            self._pass_over(target.offset - self._position)
            for start in range(0, len(target.buffer), CHUNK_BYTES):
                self._read(target.buffer[start : start + CHUNK_BYTES])

    def finish(self) -> None:
        """Read what is left.

        Raises:
            ArtifactError: the file is not what the manifest says.
        """
        self._pass_over(self._part.num_bytes - self._position)
        if self._stream.readinto(self._scratch[:1]):
            raise ArtifactError(f"{self._part.name} is longer than {self._part.num_bytes} bytes")
        if (seen := self._hash.hexdigest()) != self._part.sha256:
            raise ArtifactError(
                f"{self._part.name} has SHA-256 {seen[:12]}, expected {self._part.sha256[:12]}"
            )

    def _pass_over(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, CHUNK_BYTES):
            self._read(self._scratch[: min(CHUNK_BYTES, num_bytes - start)])

    def _read(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            got = self._stream.readinto(buffer[filled:])
            if not got:
                raise ArtifactError(
                    f"{self._part.name} ends after {self._position + filled} bytes, expected "
                    f"{self._part.num_bytes}"
                )
            filled += got
        self._hash.update(buffer)
        self._position += filled


def empty_tensors(records: Iterable[WholeTensor]) -> dict[Keys, Tensor]:
    """Tensors to be filled, on the CPU."""
    return {r.keys: torch.empty(r.shape, dtype=DTYPES[r.dtype]) for r in records}


def targets_by_part(manifest: Manifest, tensors: Mapping[Keys, Tensor]) -> dict[int, list[Target]]:
    """For each part that holds something of `tensors`: where its bytes go, in file order."""
    targets: dict[int, list[Target]] = {}
    for record in manifest.tensors:
        if record.keys in tensors:
            content, item_bytes = bytes_of(tensors[record.keys]), record.item_bytes
            for piece in record.pieces:
                buffer = content[piece.start * item_bytes : piece.stop * item_bytes]
                targets.setdefault(piece.part, []).append(Target(piece.offset, buffer))
    for of_part in targets.values():
        of_part.sort(key=lambda target: target.offset)
    return targets


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    # A dimension of one element may have any stride, in a contiguous tensor too.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
