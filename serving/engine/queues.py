"""The queue of one slot of a model: bounded, first come first served, the dead dropped on the way.

A lane is on the event loop's thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from serving.calls import Array, Call, Slot
from serving.engine.backends import Backend
from serving.engine.config import PlacementConfig, QueueConfig
from serving.engine.versions import LoadedVersion
from serving.errors import ClientGoneError, DeadlineError, ServingError
from serving.interfaces import Done


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


PACE_HOLDS_S = 1.0
"""How long the pace of a queue that has emptied since is believed."""
_SHARE = 0.25  # of a new measurement in the moving estimates
Entry = tuple[Call, Done]
Dropped = list[tuple[Call, Done, ServingError]]


class RequestQueue:
    """Calls that wait for one version, which may be changed while they wait.

    Args:
        version: that answers them; the lane counts as one of its uses while it holds calls.
        slot: as answers tell it.
        bounds: of queues.
        is_shadow: answers are thrown away: it gets less room, and computes after all others.
        goal_ms: of the model's answers.

    Attributes:
        together: calls of a batch, moving estimate of what was seen while others waited.
        waiting_since: when a batch was taken that left others waiting; 0 where none do.
    """

    __slots__ = (
        "_noted_at",
        "_pace_ms",
        "entries",
        "goal_ms",
        "is_shadow",
        "listed",
        "load",
        "most_requests",
        "most_rows",
        "rows",
        "slot",
        "together",
        "version",
        "waiting_since",
    )

    def __init__(
        self,
        version: LoadedVersion,
        slot: Slot,
        bounds: QueueConfig,
        is_shadow: bool,
        goal_ms: float = 50.0,
    ) -> None:
        share = bounds.shadow_share if is_shadow else 1.0
        self.version = version
        self.slot: Slot = slot
        self.is_shadow = is_shadow
        self.entries: deque[Entry] = deque()
        self.rows = 0
        self.most_requests = max(1, int(bounds.requests * share))
        self.most_rows = max(1, int(bounds.rows * share))
        self.load = Load()
        self.goal_ms = goal_ms
        self.together = float(bounds.requests)
        self._pace_ms = self.waiting_since = self._noted_at = 0.0
        self.listed = False
        """Whether it waits for its turn."""

    def take(self, most_rows: int, now: float) -> tuple[list[Call], list[Done], int, Dropped]:
        """The next calls that can be computed together, their rows, and what nobody waits for.

        Args:
            most_rows: of the batch; a call with more comes alone.
            now: on `time.monotonic()`.
        """
        entries, version = self.entries, self.version
        calls: list[Call] = []
        dones: list[Done] = []
        dropped: Dropped = []
        rows = 0
        lengths = None
        passed: list[Entry] = []
        while entries:
            entry = entries.popleft()
            call, done = entry
            if call.is_gone or (call.deadline is not None and call.deadline <= now):
                self.rows -= call.num_rows
                dropped.append((call, done, ended(call)))
                continue
            if calls and rows + call.num_rows > most_rows:
                entries.appendleft(entry)
                break
            if version.has_free_axes:
                if lengths is None:
                    lengths = version.lengths(call)
                elif version.lengths(call) != lengths:
                    passed.append(entry)
                    continue
            rows += call.num_rows
            calls.append(call)
            dones.append(done)
        if passed:
            entries.extendleft(reversed(passed))
        self.rows -= rows
        return calls, dones, rows, dropped

    def note_taken(self, num_calls: int, now: float) -> None:
        """A batch was taken: measure the pace of the queue where calls have waited meanwhile.

        That is the time of a turn of the loop, with all that is read and refused in it, and not
        only what the model takes.
        """
        if self.waiting_since:
            ms = (now - self.waiting_since) * 1e3
            self._pace_ms += _SHARE * (ms - self._pace_ms) if self._pace_ms else ms
            self._noted_at = now
        if self.entries or self.waiting_since:
            self.together += _SHARE * (num_calls - self.together)
        self.waiting_since = now if self.entries else 0.0

    def pace_ms(self, now: float) -> float:
        """Time from one batch to the next while calls wait; 0 where it was not seen lately."""
        return self._pace_ms if now - self._noted_at < PACE_HOLDS_S else 0.0

    def sweep(self, now: float) -> Dropped:
        """Take out the calls that nobody waits for."""
        kept: deque[Entry] = deque()
        dropped: Dropped = []
        for entry in self.entries:
            call = entry[0]
            if call.is_gone or (call.deadline is not None and call.deadline <= now):
                self.rows -= call.num_rows
                dropped.append((*entry, ended(call)))
            else:
                kept.append(entry)
        if dropped:
            self.entries = kept
        return dropped


def ended(call: Call) -> ServingError:
    """Why a call is not computed any more."""
    if call.is_gone:
        return ClientGoneError(f"the client of request {call.request_id} closed its connection")
    return DeadlineError(
        f"request {call.request_id} was not begun before its deadline; nothing was computed"
    )


def joined(calls: list[Call], names: tuple[str, ...]) -> dict[str, Array]:
    """Inputs of calls one after the other, contiguous, in the order of `names`."""
    if len(calls) == 1:
        return contiguous(calls[0], names)
    return {name: np.concatenate([call.inputs[name] for call in calls]) for name in names}


def contiguous(call: Call, names: tuple[str, ...]) -> dict[str, Array]:
    """Inputs of one call, copied only where they are not contiguous, in the order of `names`."""
    arrays = {}
    inputs = call.inputs
    for name in names:
        array = inputs[name]
        arrays[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return arrays
