"""Token buckets by client, in bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from serving.security.config import Rate


@dataclass(slots=True)
class _Bucket:
    tokens: float
    counted: float
    per_s: float
    burst: float


class Buckets:
    """One token bucket a name; the name that was longest not seen makes room for a new one.

    Args:
        rate: of all that `special` does not name.
        capacity: names that are remembered. Who is forgotten begins with a full bucket, so a
            bound far below the number of clients weakens the limit; it never strengthens it.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        rate: Rate,
        capacity: int,
        special: dict[str, Rate] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._special = special or {}
        self._capacity = capacity
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str) -> float:
        """Take one request; 0.0 where it was there, else the seconds until there is one."""
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._remember(name, now)
        self._buckets.move_to_end(name)
        tokens = bucket.tokens + (now - bucket.counted) * bucket.per_s
        bucket.counted = now
        if tokens < 1.0:
            bucket.tokens = tokens
            return (1.0 - tokens) / bucket.per_s
        bucket.tokens = (tokens if tokens < bucket.burst else bucket.burst) - 1.0
        return 0.0

    def _remember(self, name: str, now: float) -> _Bucket:
        if len(self._buckets) >= self._capacity:
            self._buckets.popitem(last=False)
        rate = self._special.get(name, self._rate)
        bucket = self._buckets[name] = _Bucket(rate.burst, now, rate.per_s, rate.burst)
        return bucket
