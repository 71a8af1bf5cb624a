"""One loaded form of a version behind one interface, whatever runtime computes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.interfaces import Array, Served, Track
from tasks.contracts.conversion import BATCH_AXIS, Signature


@dataclass(eq=False, slots=True)
class Circuit:
    """Closed: batches pass. Open: none does. Half open: one probe is under way.

    Times are of `time.monotonic()`.
    """

    open_s: float = 1.0
    most_open_s: float = 30.0
    reason: str = ""
    """Of the last failure; empty where closed."""
    closed: bool = True
    times_opened: int = 0
    probing: bool = False
    retry_at: float = 0.0
    _next_s: float = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Open it, longer each time until something succeeds."""
        if self.closed:
            self.times_opened += 1
            self._next_s = self.open_s
        else:
            self._next_s = min(self._next_s * 2, self.most_open_s)
        self.closed, self.probing, self.reason = False, False, reason
        self.retry_at = now + self._next_s

    def probe_due(self, now: float) -> bool:
        """Whether a probe should be sent; the one who is told so sends it."""
        if self.closed or self.probing or now < self.retry_at:
            return False
        self.probing = True
        return True

    def healed(self) -> None:
        """The probe was answered."""
        self.closed, self.probing, self.reason = True, False, ""


Score = Callable[[dict[str, Array]], NDArray[Any]]
PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "openvino": "openvino_ir",
    "pytorch": "pytorch_program",
    "tensorrt": "tensorrt_plan",
}
_SIZES = 40  # powers of two of a batch's numbers
_SHARE = 0.25  # of a new measurement in the moving estimate


class Times:
    """Moving estimate of how long a batch takes, by the power of two of its numbers.

    Only the event loop's thread changes it.
    """

    __slots__ = ("_known", "_ms")

    def __init__(self) -> None:
        self._ms = [0.0] * _SIZES
        self._known: list[int] = []

    def note(self, size: int, ms: float) -> None:
        """A batch of `size` numbers took `ms`."""
        place = size.bit_length()
        seen = self._ms[place]
        if seen:
            self._ms[place] = seen + _SHARE * (ms - seen)
        else:
            self._ms[place] = ms
            self._known = sorted({*self._known, place})

    def expected_ms(self, size: int) -> float:
        """How long a batch of `size` numbers takes; 0 where nothing was measured yet.

        Of a size that was never run: as long as the next smaller one for each of its numbers.
        """
        place = size.bit_length()
        seen = self._ms[place]
        if seen or not self._known:
            return seen
        smaller = [known for known in self._known if known < place]
        if not smaller:
            return self._ms[self._known[0]]
        return self._ms[smaller[-1]] * float(1 << (place - smaller[-1]))


@dataclass(eq=False, slots=True)
class Tally:
    """What one kind of answer amounts to: same version, backend and track, same fall-over."""

    served: Served
    calls: int = 0
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class Backend:
    """A variant of a version on one kind of hardware.

    Args:
        score: runs the model; arrays are contiguous, of the signature's types and order. One call
            at a time: `busy` says that one is under way.
        probe: inputs of one row that it must be able to answer.
    """

    hardware: str
    variant: str
    platform: str
    score: Score
    signature: Signature
    probe: Mapping[str, Array]
    circuit: Circuit = field(default_factory=Circuit)
    times: Times = field(default_factory=Times)
    busy: bool = False
    failures: int = 0
    running_since: float = 0.0
    running_ms: float = 0.0
    """What the batch under way was expected to take."""
    tallies: dict[tuple[Track, str], Tally] = field(default_factory=dict)

    def run(self, arrays: dict[str, Array], rows: int) -> Array:
        """Answers to `rows` rows, in their order.

        Raises:
            Exception: whatever the runtime raises; also where it gives another number of rows.
        """
        if rows == 0:
            return self._nothing(arrays)
        answers: Array = self.score(arrays)
        if answers.shape[0] != rows:
            raise RuntimeError(f"it gave {answers.shape[0]} answers to {rows} rows")
        return answers

    def is_well(self) -> bool:
        """Whether the probe is answered now, with numbers."""
        try:
            return bool(np.isfinite(self.run(dict(self.probe), 1)).all())
        except Exception:  # whatever it is, it does not answer
            return False

    def measure(self, calls: list[Mapping[str, Array]]) -> None:
        """Take the time of some calls, once to warm up and then for the estimate."""
        for call in calls:
            first = next(iter(call.values()))
            arrays = dict(call)
            self.run(arrays, first.shape[0])
            started = time.perf_counter()
            self.run(arrays, first.shape[0])
            self.times.note(first.size, (time.perf_counter() - started) * 1e3)

    def _nothing(self, arrays: Mapping[str, Array]) -> Array:
        axes: dict[str, int] = {BATCH_AXIS: 0}
        for spec in self.signature.inputs:
            for axis, length in zip(spec.shape, arrays[spec.name].shape, strict=True):
                if isinstance(axis, str):
                    axes.setdefault(axis, length)
        shape = [
            axes.get(axis, 0) if isinstance(axis, str) else axis
            for axis in self.signature.output.shape
        ]
        return np.empty(shape, dtype=self.signature.output.dtype)
