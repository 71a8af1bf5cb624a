"""Whether a claim is still somebody's.

No clock that can jump decides it for a machine's own claims. Who shares a device is on one machine,
and there the clock since its boot (`time.monotonic`) is the same for all and only goes forward. It
stands still while the machine sleeps, for those who hold as for those who wait.

Claims of another boot (the machine lost power, or a sandbox pretends to be a machine of its own)
are gone when they have expired by the database's clock, and the one who wants the device has
itself seen no sign of life for as long. A database's clock that jumps ahead gives nothing away.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tasks.control.leases.claims import HELD, Claim
from tasks.kernel.process import ProcessName, processes_by_variable

LEASE_VARIABLE = "FALAJ_LEASE"
"""What a lease's holder finds in its environment, and everything that it starts inherits."""


class Liveness:
    """What one process can tell of others' claims; remembers what it has seen.

    Args:
        me: the process that looks.
        clock: seconds since the machine's boot.
    """

    def __init__(self, me: ProcessName, clock: Callable[[], float] = time.monotonic) -> None:
        self._me = me
        self._clock = clock
        self._first_seen_s: dict[tuple[int, int], float] = {}

    def why_gone(self, claim: Claim, now_s: float) -> str | None:
        """Why a claim is nobody's any more; None where it still is somebody's.

        Args:
            claim: as it was read last.
            now_s: the database's clock.
        """
        patience_s = claim.ttl_s + claim.grace_s
        if claim.process.boot != self._me.boot:
            seen_s = self._first_seen_s.setdefault((claim.ticket, claim.beat), self._clock())
            silent = self._clock() - seen_s > patience_s
            expired = now_s > claim.expires_s + claim.grace_s
            return "its machine has gone" if silent and expired else None
        if self._clock() > claim.deadline_s + claim.grace_s:
            return f"it gave no sign of life for {patience_s:g} s"
        if not claim.process.is_visible_to(self._me) or not claim.process.has_ended():
            return None
        if claim.state == HELD and kin_of_lease(claim.mark):
            return None  # what it started still runs, under its guard, for some seconds
        return "its process has ended"


def kin_of_lease(mark: str) -> list[int]:
    """Process ids of everything that was started under a lease (its `mark`) and still runs."""
    return processes_by_variable(LEASE_VARIABLE).get(mark, [])
