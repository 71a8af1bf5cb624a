"""A loaded version: what computes it on each kind of hardware, and what it takes."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.interfaces import Array, Call, Served, Track
from tasks.contracts.conversion import Signature


@dataclass(eq=False, slots=True)
class Circuit:
    """Closed: batches pass. Open: none does, and the backend is asked at times whether it is well.

    Times are of `time.monotonic()`.
    """

    open_s: float = 1.0
    most_open_s: float = 30.0
    reason: str = ""
    """Of the last failure; empty where closed."""
    closed: bool = True
    retry_at: float = 0.0
    _next_s: float = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Open it, longer each time until something succeeds."""
        self._next_s = self.open_s if self.closed else min(self._next_s * 2, self.most_open_s)
        self.closed, self.reason, self.retry_at = False, reason, now + self._next_s

    def healed(self) -> None:
        """The backend answers."""
        self.closed, self.reason = True, ""


Score = Callable[[dict[str, Array]], NDArray[Any]]
PLATFORMS = {"onnx": "onnxruntime_onnx", "openvino": "openvino_ir", "tensorrt": "tensorrt_plan"}
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
        power = size.bit_length()
        seen = self._ms[power]
        if seen:
            self._ms[power] = seen + _SHARE * (ms - seen)
        else:
            self._ms[power] = ms
            self._known = sorted({*self._known, power})

    def expected_ms(self, size: int) -> float:
        """How long a batch of `size` numbers takes; 0 where nothing was measured yet.

        Of a size that was never run: as long as the next smaller one for each of its numbers.
        """
        power = size.bit_length()
        seen = self._ms[power]
        if seen or not self._known:
            return seen
        smaller = [known for known in self._known if known < power]
        if not smaller:
            return self._ms[self._known[0]]
        return self._ms[smaller[-1]] * float(1 << (power - smaller[-1]))


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
    probe: Mapping[str, Array]
    circuit: Circuit = field(default_factory=Circuit)
    times: Times = field(default_factory=Times)
    busy: bool = False
    failures: int = 0
    served: dict[tuple[Track, str], Served] = field(default_factory=dict)
    """What answers say of it, by track and by the hardware that was preferred and failed."""

    def run(self, arrays: dict[str, Array], rows: int) -> Array:
        """Answers to `rows` rows, in their order.

        Raises:
            Exception: whatever the runtime raises; also where it gives another number of rows.
        """
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
        """Plain values, because a call takes a few microseconds."""
        self.model, self.version = self.key.model, self.key.version
        self.output = self.signature.output.name
        self.names = tuple(spec.name for spec in self.signature.inputs)
        tails = [spec.shape[1:] for spec in self.signature.inputs]
        self.has_free_axes = any(isinstance(axis, str) for tail in tails for axis in tail)
        self.row_size = 0 if self.has_free_axes else math.prod(int(axis) for axis in tails[0])
        """Numbers of a row in the first input; 0 where calls differ in it."""

    def lengths(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Lengths of all axes but the first: calls with the same ones can be computed together."""
        return tuple([call.inputs[name].shape[1:] for name in self.names])

    def size_of(self, call: Call) -> int:
        """Numbers of one row of a call in the first input."""
        return math.prod(call.inputs[self.names[0]].shape[1:])

    def served(self, backend: Backend, track: Track, fell_over_from: str) -> Served:
        """What an answer says of what gave it."""
        key = (track, fell_over_from)
        found = backend.served.get(key)
        if found is None:
            found = backend.served[key] = Served(
                self.model, self.version, backend.variant, track, backend.hardware, fell_over_from
            )
        return found


@dataclass(frozen=True)
class Failure:
    """A failed load. Times are of `time.monotonic()`."""

    reason: str
    digest: str
    """Of what could not be loaded; when it changes, it may be tried at once."""
    attempts: int
    retry_at: float
