"""Choosing the place of a stage: a pure function of the rules and of what the pools look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, Protocol

from tasks.control.routing.config import StageRouting

Rule = Literal["wanted class", "fall back"]
MISSED_HEARTBEATS = 3
"""A worker that missed so many is gone; the server itself takes longer to say so."""
DEFAULT_HEARTBEAT_S = 30


class Heartbeats(Protocol):
    """A Prefect worker, as far as it says that it lives."""

    last_heartbeat_time: datetime | None
    heartbeat_interval_seconds: int | None


def is_online(worker: Heartbeats, now: datetime) -> bool:
    """True where a worker's last heartbeat is recent."""
    if worker.last_heartbeat_time is None:
        return False
    interval_s = worker.heartbeat_interval_seconds or DEFAULT_HEARTBEAT_S
    return now - worker.last_heartbeat_time < timedelta(seconds=MISSED_HEARTBEATS * interval_s)


@dataclass(frozen=True)
class Place:
    """A deployment that could run the stage, and its work pool as it is now."""

    deployment: str
    hardware_class: str
    pool: str | None = None
    num_workers_online: int = 0
    fault: str | None = None
    """Why it cannot take runs whatever its workers do, such as a pause."""

    @property
    def refusal(self) -> str | None:
        """Why it cannot take a run now; None where it can."""
        if self.fault:
            return f"{self.deployment}: {self.fault}"
        if not self.num_workers_online:
            return f"{self.deployment}: no worker of work pool {self.pool!r} is online"
        return None


@dataclass(frozen=True)
class Choice:
    """The place that was chosen, or that the stage is to wait, or that there is none.

    Attributes:
        place: where to run; None while waiting and where there is none.
        wait: True where asking again later may help.
        rule: by which rule the place was chosen.
        reason: why, in a sentence.
        refused: places that were asked before, and why each was not taken.
    """

    place: Place | None
    wait: bool
    rule: Rule
    reason: str
    refused: tuple[str, ...] = ()


def choose(
    routing: StageRouting, wanted: Place, others: Sequence[Place], waited_s: float
) -> Choice:
    """Where a stage goes now.

    The wanted class is taken while it has a worker. Without one the stage waits as long as it may,
    then takes the first other class that has one.

    Args:
        routing: the stage's rule.
        wanted: the place of the class that it wants.
        others: the places of `routing.fall_back`, in that order.
        waited_s: seconds for which the wanted place has had no worker.
    """
    refusal = wanted.refusal
    if refusal is None:
        return Choice(wanted, False, "wanted class", "it has a worker online")
    if waited_s < routing.wait_s:
        reason = f"{refusal}; waited {waited_s:.0f} s of at most {routing.wait_s:.0f} s"
        return Choice(None, True, "wanted class", reason)
    refused = [f"{refusal}, for {waited_s:.0f} s"]
    for place in others:
        if place.refusal is None:
            reason = f"no worker of the wanted class for {waited_s:.0f} s; fall_back names this one"
            return Choice(place, False, "fall back", reason, tuple(refused))
        refused.append(place.refusal)
    reason = (
        f"{'; '.join(refused)}. Start a worker (`prefect worker start --pool {wanted.pool}`), wait "
        "longer (`routing.<stage>.wait_s`) or name another class (`routing.<stage>.fall_back`); "
        "finished stages are kept"
    )
    return Choice(None, False, "fall back", reason, tuple(refused))
