"""The machine's clock, seen against the one that counts from its boot, which nobody can set.

Prefect's server plans by the machine's clock: when each of its services works next, and the runs of
schedules some hours ahead. Where the clock is set back it finds that all of this lies ahead, and
plans nothing more until the old time has come again. So it is started anew, and the runs that it
had planned are removed; the scheduler makes them again by the clock that is right now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from infra.platform.api import PrefectApi
from infra.platform.state import now
from tasks.kernel.errors import ConfigurationError, TransientError

LOGGER = logging.getLogger(__name__)

NOTICED_S = 60.0
"""Less is what NTP mends on the way, and costs schedules no more than that."""


class Clock:
    """Tells when the machine's clock was set back.

    Args:
        shown: seconds, by the clock that can be set.
        steady: seconds, by one that cannot.
    """

    def __init__(
        self,
        shown: Callable[[], float] = time.time,
        steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._shown, self._steady = shown, steady
        self._ahead_s = shown() - steady()

    def set_back_s(self) -> float:
        """Seconds by which it was set back since this was asked last; 0 where it was not."""
        ahead_s = self._shown() - self._steady()
        back_s, self._ahead_s = self._ahead_s - ahead_s, ahead_s
        return back_s if back_s >= NOTICED_S else 0.0


def forget_planned_runs(api: PrefectApi) -> bool:
    """Remove the runs that the scheduler has made for later; False where the server refused.

    Runs that a person has planned for a time are left.
    """
    try:
        removed = api.forget_planned(now().isoformat())
    except (TransientError, ConfigurationError) as exc:
        LOGGER.warning("runs planned by the clock as it was could not be removed: %s", exc)
        return False
    LOGGER.warning("removed %d runs planned by the clock as it was; they are planned anew", removed)
    return True
