"""How long ago something was: by a clock that nobody can set, where one can tell.

The clock that counts from a machine's boot goes on while it sleeps, and is the same for all its
processes. What was noted in another boot, or on another machine, has only the database's clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tasks.kernel.process import boot_id


@dataclass(frozen=True)
class Uptime:
    """A moment of one boot of one machine."""

    boot: str
    seconds: float
    """Since that boot."""

    @classmethod
    def now(cls) -> Uptime:
        """This moment, here."""
        return cls(boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def seconds_since(self, earlier: Uptime) -> float | None:
        """Seconds from an earlier moment to this one; None where it is of another boot."""
        return self.seconds - earlier.seconds if earlier.boot == self.boot else None
