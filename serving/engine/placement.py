"""Which hardware computes the next batch of a slot, by a stated policy.

The first backend is preferred. The others help while the queue is too long or the wait is expected
to exceed the goal, and stop when both were below a part of these bounds for some time: that
hysteresis keeps batches from wandering. A large batch goes to whatever is measured to be clearly
faster with it. A backend whose circuit is open gets nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from serving.engine.backends import Backend
from serving.engine.config import PlacementConfig


@dataclass(eq=False, slots=True)
class Load:
    """How one slot of a version is loaded, as the policy remembers it."""

    spilling: bool = False
    calm_since: float | None = None
    times_spilled: int = 0

    def note(self, requests: int, wait_ms: float, config: PlacementConfig, now: float) -> None:
        """Take in the queue as it is before a batch is taken from it."""
        if requests > config.queued_requests or wait_ms > config.latency_goal_ms:
            self.times_spilled += not self.spilling
            self.spilling, self.calm_since = True, None
        elif self.spilling:
            low = config.release
            if requests > config.queued_requests * low or wait_ms > config.latency_goal_ms * low:
                self.calm_since = None
            elif self.calm_since is None:
                self.calm_since = now
            elif now - self.calm_since >= config.settle_s:
                self.spilling, self.calm_since = False, None


@dataclass(frozen=True, slots=True)
class Place:
    """A backend, and which one was passed over for it."""

    backend: Backend
    fell_over_from: str = ""


def place(
    backends: Sequence[Backend],
    load: Load,
    size: int,
    rows: int,
    config: PlacementConfig,
    full: Collection[str] = (),
) -> Place | None:
    """Where a batch goes now; None where it has to wait for a backend that is at work.

    Args:
        backends: in the order of preference.
        load: of the slot.
        size: numbers in the batch, as `Times` counts them.
        rows: of the batch.
        full: hardware that computes as many batches as it may.
    """
    working = [backend for backend in backends if backend.circuit.closed]
    if not working:
        return None
    preferred = backends[0]
    first = working[0]
    if config.large_rows is not None and rows >= config.large_rows and len(working) > 1:
        first = _fastest(working, size, config.gain)
        if first is not preferred and _is_free(first, full) and preferred.circuit.closed:
            return Place(first)  # chosen for its speed: nothing failed and nothing was full
    passed_over = "" if preferred.circuit.closed else preferred.hardware
    if _is_free(first, full):
        return Place(first, passed_over)
    if load.spilling:
        for backend in working:
            if _is_free(backend, full):
                return Place(backend, passed_over or first.hardware)
    return None


def _is_free(backend: Backend, full: Collection[str]) -> bool:
    return not backend.busy and backend.hardware not in full


def _fastest(working: Sequence[Backend], size: int, gain: float) -> Backend:
    """The preferred one, unless another is `gain` times faster with a batch of this size."""
    mark = working[0].times.expected_ms(size)
    best = min(working, key=lambda backend: backend.times.expected_ms(size))
    return best if best.times.expected_ms(size) * gain <= mark else working[0]
