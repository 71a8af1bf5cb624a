"""Which refused calls are written, and as what: an overload must not flood the log."""

from __future__ import annotations

import time
from collections.abc import Callable

from serving.calls import Call, Served, Slot
from serving.errors import ServingError
from serving.log.columns import Refusal
from tasks.predictions.config import FAULTS_PER_S, REFUSALS_PER_S

VersionOf = Callable[[str, Slot], str | None]
"""Which version a model's slot names; called on the loop."""

FAULTS = frozenset({"backend", "deadline", "internal", "not_computed", "not_ready"})
"""Reasons that may be a version's own fault: those are what releases are judged by."""

RATE, UNKNOWN_MODEL = "refusal_rate", "refusal_unknown_model"


class Bucket:
    """Lets so many through a second on average, and as many at once.

    Args:
        rate: a second; 0 lets nothing through.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate) if rate else 0.0
        self._tokens, self._at = self._most, time.monotonic()

    def take(self, now: float) -> bool:
        """Whether one more may pass."""
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class RefusalGate:
    """Decides of each refused call; on the loop's thread alone.

    Args:
        version_of: names the version that would have answered; without it, the one that did last.
    """

    def __init__(self, version_of: VersionOf | None) -> None:
        self._faults = Bucket(FAULTS_PER_S)
        self._others = Bucket(REFUSALS_PER_S)
        self._version_of = version_of
        self._last: dict[tuple[str, Slot], str] = {}
        self.models: set[str] = set()
        """Models that are known: a name that a client made up makes no folder."""

    def note(self, served: Served) -> None:
        """Remember what answers; to be called when it changes, at least."""
        self.models.add(served.model)
        self._last[served.model, served.slot] = served.version

    def judge(self, call: Call, error: ServingError) -> Refusal | str:
        """What is to be written of a call, or the reason why nothing is."""
        if call.model not in self.models:
            return UNKNOWN_MODEL
        now = time.monotonic()
        if not (self._faults if error.reason in FAULTS else self._others).take(now):
            return RATE
        waited = now - call.arrived
        return Refusal(
            model=call.model,
            request_id=call.request_id,
            version=call.version or self._version(call.model, call.slot),
            slot=call.slot,
            subject=call.subject,
            num_rows=call.num_rows,
            error=error.reason,
            arrived_at=time.time() - waited,
            latency_us=round(waited * 1e6),
        )

    def _version(self, model: str, slot: Slot) -> str:
        named = self._version_of(model, slot) if self._version_of else None
        return named or self._last.get((model, slot), "")
