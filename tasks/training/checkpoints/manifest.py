"""What a checkpoint consists of: the file that is written last and that makes the others count."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from tasks.kernel.errors import ArtifactError
from tasks.training.checkpoints.state import (
    DTYPES,
    MAX_DEPTH,
    PLAIN_DTYPE,
    PLAIN_KEYS,
    Keys,
    name_of,
)

FORMAT = 1
MANIFEST_NAME = "manifest.json"
FOLDER_PATTERN = re.compile(r"state-(\d{5,9})-(\d{9,15})-[0-9a-f]{8}")
PART_PATTERN = r"^part-\d{5}-\d{5}\.safetensors$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """Names one checkpoint of a store; the newest is the largest.

    `epoch` and `step` say where training goes on: step 0 follows the end of the epoch before.
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


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Record):
    """One file of tensors, in the safetensors format."""

    name: str = Field(pattern=PART_PATTERN)
    num_bytes: NonNegativeInt
    sha256: str = Field(pattern=SHA256_PATTERN)


class Piece(_Record):
    """Consecutive elements of a tensor, `start` to `stop`, row by row, and where they are."""

    part: NonNegativeInt
    """Position in the list of parts."""
    offset: NonNegativeInt
    """Bytes before them in the part's file."""
    start: NonNegativeInt
    stop: NonNegativeInt


class WrittenTensor(_Record):
    """One tensor of the state, or some of its rows, and the pieces that it is stored in."""

    keys: tuple[str | int, ...] = Field(max_length=MAX_DEPTH)
    dtype: str
    shape: tuple[NonNegativeInt, ...] = Field(max_length=MAX_DEPTH)
    """Of the whole tensor."""
    pieces: tuple[Piece, ...]


class WholeTensor(WrittenTensor):
    """One tensor of the state, of which no element is missing."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @model_validator(mode="after")
    def _pieces_make_the_whole(self) -> Self:
        ends = [0, *(end for piece in self.pieces for end in (piece.start, piece.stop))]
        ends.append(prod(self.shape))
        meet = all(left == right for left, right in zip(ends[::2], ends[1::2], strict=True))
        if self.dtype not in DTYPES or not meet or ends != sorted(ends):
            raise ValueError(
                f"{name_of(self.keys)}: a kind of number that is not known, or pieces that do not "
                "make a whole"
            )
        return self


class Section(_Record):
    """What one rank wrote."""

    parts: tuple[Part, ...]
    tensors: tuple[WrittenTensor, ...]


class Manifest(_Record):
    """A whole checkpoint."""

    epoch: NonNegativeInt
    step: NonNegativeInt
    parts: tuple[Part, ...]
    tensors: tuple[WholeTensor, ...]

    @classmethod
    def of(cls, ref: CheckpointRef, sections: Sequence[Section]) -> Self:
        """The manifest of what all ranks wrote, in any order.

        Raises:
            ValidationError: their pieces do not make whole tensors.
        """
        parts: list[Part] = []
        tensors: dict[Keys, WrittenTensor] = {}
        for section in sections:
            for written in section.tensors:
                moved = [
                    piece.model_copy(update={"part": piece.part + len(parts)})
                    for piece in written.pieces
                ]
                earlier = tensors.get(written.keys, written.model_copy(update={"pieces": ()}))
                pieces = sorted([*earlier.pieces, *moved], key=lambda p: (p.start, p.stop))
                tensors[written.keys] = written.model_copy(update={"pieces": tuple(pieces)})
            parts += section.parts
        records = tuple(WholeTensor(**written.model_dump()) for written in tensors.values())
        return cls(epoch=ref.epoch, step=ref.step, parts=tuple(parts), tensors=records)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @model_validator(mode="after")
    def _pieces_lie_in_their_parts(self) -> Self:
        """So nobody allocates more for a checkpoint than it has bytes."""
        spans: list[tuple[int, int, int]] = []
        for record in self.tensors:
            for piece in record.pieces:
                stop = piece.offset + (piece.stop - piece.start) * record.item_bytes
                if piece.part >= len(self.parts) or stop > self.parts[piece.part].num_bytes:
                    raise ValueError(f"a piece of {name_of(record.keys)} is in no part")
                spans.append((piece.part, piece.offset, stop))
        for before, after in pairwise(sorted(spans)):
            if before[0] == after[0] and before[2] > after[1]:
                raise ValueError("two pieces share bytes")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for names in ([record.keys for record in self.tensors], [p.name for p in self.parts]):
            if len(set(names)) < len(names):
                raise ValueError("a tensor or a part is named twice")
        plain = [record.dtype for record in self.tensors if record.keys == PLAIN_KEYS]
        if plain != [PLAIN_DTYPE]:
            raise ValueError("the plain part of the state is missing")
        return self

    def to_bytes(self) -> bytes:
        """The manifest's file; it carries its own digest."""
        content = self.model_dump(mode="json")
        return json.dumps(
            {"format": FORMAT, "sha256": _digest_of(content), "content": content}
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read and check what `to_bytes` gave.

        Raises:
            ArtifactError: it is damaged, or of another format; the text is the reason alone.
        """
        try:
            file = json.loads(content)
            form = file["format"]
            if form != FORMAT:
                raise ArtifactError(f"its format is {form!r}, expected {FORMAT}")
            if _digest_of(file["content"]) != file["sha256"]:
                raise ArtifactError(f"{MANIFEST_NAME} does not match its own digest")
            return cls.model_validate(file["content"])
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise ArtifactError(f"{MANIFEST_NAME} is no manifest ({_first_line(exc)})") from exc


def _digest_of(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _first_line(exc: Exception) -> str:
    lines: Iterable[str] = (
        (error["msg"] for error in exc.errors())
        if isinstance(exc, ValidationError)
        else str(exc).splitlines()
    )
    return next(iter(lines), type(exc).__name__)
