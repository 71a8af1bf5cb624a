"""A loaded version: its backends, what it takes, and who still needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.engine.backends import Backend, Tally
from serving.errors import BadRequestError, ServingError, TooLargeError
from serving.interfaces import Array, Call, Served, Track
from tasks.contracts.conversion import BATCH_AXIS, Signature, TensorSpec


@dataclass(frozen=True)
class VersionKey:
    """What makes two loads of a version the same: its number, program and variants."""

    model: str
    version: str
    digest: str = ""


@dataclass(eq=False)
class LoadedVersion:
    """A version that may answer.

    Attributes:
        backends: the preferred one first.
        troubles: why a kind of hardware that was asked for has no backend here.
        uses: batches under way, and queues that hold calls for it.
        closing: to be unloaded after its last use.
        closed: its backends are gone.
    """

    key: VersionKey
    signature: Signature
    backends: tuple[Backend, ...]
    troubles: tuple[str, ...] = ()
    uses: int = 0
    closing: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        """Plain values, because a call is checked in less than a microsecond."""
        self.model, self.version = self.key.model, self.key.version
        self.output = self.signature.output.name
        self.most_rows = self.signature.largest.get(BATCH_AXIS, 1 << 31)
        self._specs = tuple(
            (spec.name, np.dtype(spec.dtype), spec.shape[1:]) for spec in self.signature.inputs
        )
        free = any(isinstance(axis, str) for _, _, tail in self._specs for axis in tail)
        self.has_free_axes = free
        self.names = tuple(spec.name for spec in self.signature.inputs)
        first = self._specs[0][2]
        self.row_size = 0 if free else math.prod(int(axis) for axis in first)
        """Numbers of a row in the first input; 0 where calls differ in it."""

    def objection(self, call: Call) -> ServingError | None:
        """Why the version cannot take a call's inputs; None where it can."""
        inputs, rows = call.inputs, call.num_rows
        if len(inputs) != len(self._specs) or rows > self.most_rows:
            return self._told(call)
        free = self.has_free_axes
        for name, dtype, tail in self._specs:
            array = inputs.get(name)
            if array is None or array.dtype != dtype:
                return self._told(call)
            shape = array.shape
            if shape[0] != rows or (not free and shape[1:] != tail):
                return self._told(call)
        return self._told(call) if free and not self._fits(inputs) else None

    def lengths(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Lengths of all axes but the first: calls with the same ones can be computed together."""
        return tuple([call.inputs[name].shape[1:] for name in self.names])

    def size_of(self, call: Call) -> int:
        """Numbers of one row of a call in the first input."""
        return math.prod(call.inputs[self.names[0]].shape[1:])

    def tally(self, backend: Backend, track: Track, fell_over_from: str) -> Tally:
        """Where answers of this kind are counted."""
        key = (track, fell_over_from)
        found = backend.tallies.get(key)
        if found is None:
            served = Served(
                self.model, self.version, backend.variant, track, backend.hardware, fell_over_from
            )
            found = backend.tallies[key] = Tally(served)
        return found

    def _fits(self, inputs: Mapping[str, Array]) -> bool:
        axes: dict[str, int] = {}
        largest = self.signature.largest
        for name, _, tail in self._specs:
            shape = inputs[name].shape[1:]
            if len(shape) != len(tail):
                return False
            for length, axis in zip(shape, tail, strict=True):
                if isinstance(axis, int):
                    if length != axis:
                        return False
                elif length != axes.setdefault(axis, length) or length > largest.get(axis, length):
                    return False
        return True

    def _told(self, call: Call) -> ServingError:
        if call.num_rows > self.most_rows:
            return TooLargeError(
                f"{call.num_rows} rows were sent, {self.model} version {self.version} takes at "
                f"most {self.most_rows} in one request; send them in parts"
            )
        seen = {
            name: f"{np.asarray(array).dtype} {list(np.shape(array))}"
            for name, array in call.inputs.items()
        }
        return BadRequestError(
            f"{self.model} version {self.version} takes {_shown(self.signature.inputs)} with "
            f"{call.num_rows} rows{_longest(self.signature)}, and got {seen}"
        )


def _shown(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name}: {spec.dtype} {list(spec.shape)}" for spec in specs)


def _longest(signature: Signature) -> str:
    most = {axis: n for axis, n in signature.largest.items() if axis != BATCH_AXIS}
    return f" (at most {most})" if most else ""


@dataclass(frozen=True)
class Failure:
    """A failed load. Times are of `time.monotonic()`."""

    reason: str
    digest: str
    """Of what could not be loaded; when it changes, it may be tried at once."""
    attempts: int
    retry_at: float
