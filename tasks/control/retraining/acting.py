"""Carrying actions out: start each claimed one once, and learn how its run ended.

    claimed -> reserved (platform) -> started (run id) -> ended (state, seconds)

A process killed between two of these leaves the earlier one in the table, and the sweep goes on
from there. Starting again is safe on one platform: the incident is the key under which it gives the
same run. Another platform on the same database knows nothing of that key, so whoever starts a run
reserves its claim first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState, Order, RunEnd, StartedAction
from tasks.kernel.errors import FalajError

logger = logging.getLogger(__name__)


LOST = "lost"
"""State of a run whose process is gone, and that nobody else will bring to an end."""


class Starter(Protocol):
    """What runs retrainings, recalibrations and roll backs."""

    def start(self, order: Order) -> StartedAction | None:
        """Start an action and return at once; the same order again gives the same run.

        None where another platform, or another process, has taken it.

        Raises:
            TransientError: it could not be started now.
            ConfigurationError: nothing here can run it.
        """

    def end(self, order: Order, started: StartedAction) -> RunEnd | None:
        """How a run ended; None while it runs, `LOST` where it is to be taken up again.

        Raises:
            TransientError: nobody could say.
        """


def start_claimed(ledger: Ledger, orders: Sequence[Order], starter: Starter) -> list[StartedAction]:
    """Start what was claimed; a start that fails is noted with the claim and tried again later.

    Raises:
        FalajError: the first start that failed, after all others were tried.
    """
    started, failures = [], list[FalajError]()
    for order in orders:
        try:
            run = starter.start(order)
        except FalajError as exc:
            ledger.mark_trouble(order.incident_id, f"{type(exc).__name__}: {exc}")
            logger.warning("%s of %s could not be started: %s", order.action, order.model, exc)
            failures.append(exc)
            continue
        if run is None:
            logger.info("%s of %s is started elsewhere", order.action, order.model)
            continue
        ledger.mark_started(order.incident_id, run)
        logger.info("%s of %s runs as %s in %s", order.action, order.model, run.run_id, run.place)
        started.append(run)
    if failures:
        raise failures[0]
    return started


def note_ends(ledger: Ledger, starter: Starter) -> int:
    """Note the end of each started run that has ended; returns how many that were.

    One that is lost is claimed anew: finished stages are kept, so it goes on where it was.
    """
    num_ended = 0
    for claim in ledger.claims(ClaimState.STARTED):
        if claim.started is None:
            continue
        end = starter.end(claim.order, claim.started)
        if end is not None and end.state == LOST:
            ledger.take_up(claim.order.incident_id, claim.started.run_id)
            logger.warning("the process of run %s is gone; taken up again", claim.started.run_id)
        elif end is not None and ledger.mark_ended(claim.order.incident_id, end):
            num_ended += 1
            logger.info("run %s of %s: %s", claim.started.run_id, claim.order.model, end.state)
    return num_ended
