"""What elastic training asks of the training loop, and what a rank commits to memory.

The order of calls on every rank, again for each new group of ranks:

    session.rejoin(ranks)      the ranks have changed: take the shards that are now mine
    session.restore(state)     go back (or forward) to what was committed
    session.run(commit_point)  train on, and call commit_point between two steps

A rank that is lost in the middle makes a collective fail on the others: the error must pass out of
`run`. What happened after the last commit is then done again by those that are left.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tasks.training.checkpoints.store import deserialized, serialized, to_host
from tasks.training.elastic.link import Pulse, RankLink
from tasks.training.strategies.base import Communicator, State

LOGGER = logging.getLogger(__name__)


class Regroup(BaseException):
    """Raised by the commit point where the ranks change; must pass out of `run` on every rank.

    No `Exception`, so that nothing that handles errors of training takes it for one.
    """


# What `run` is handed, to be called after each step; every rank must call it after the same steps.
#
# Now and then it commits: calls `snapshot` and keeps what it returns. Most calls cost a comparison;
# one in a second is a small collective. Raises `Regroup` where a rank is to join or to leave; all
# is committed.
CommitPoint = Callable[[], None]


class ElasticSession(Protocol):
    """One rank's training as elastic training sees it. All methods are collective.

    May be built on a rank that joins hours after the start. So the constructor must not use
    collectives, and what the first ranks agreed on then (such as fitted preprocessing) is either
    part of the state or agreed on again in `rejoin`, by new and old ranks alike.
    """

    def rejoin(self, ranks: Communicator) -> None:
        """Take part in a new group: other ranks, another size, maybe another rank for this one.

        Args:
            ranks: of the new group; any earlier one is dead and must not be used.
        """

    def snapshot(self) -> State:
        """All that is needed to go on from here; called between two steps, or after `rejoin`.

        On the first call in the life of a job, where no rank holds anything committed, rank 0's
        counts: the newest checkpoint, or the beginning. Tensors may be the live ones, they are
        copied; only what `torch.load(weights_only=True)` accepts.
        """

    def restore(self, state: State) -> None:
        """Take over what `snapshot` gave on this or on another rank, in a group of any size."""

    def run(self, commit_point: CommitPoint) -> None:
        """Train from the restored state to the end, and write the result.

        A call may follow on one that was broken off anywhere, and on one that came to its end on
        this rank while another was lost before it had reached the end.
        """

    def checkpoint(self, state: State) -> None:
        """Write a committed state so that it survives all ranks; returns when it is whole.

        Called when a rank is to be ended soon.
        """


# A broadcast of more than 2 GB at once is more than some transports take.
CHUNK_BYTES = 1 << 28
MAX_STEPS_BETWEEN_CHECKS = 100_000
COMMIT_INTERVAL_S = 0.5
"""Seconds of work that a lost rank may cost all."""
# Commits take at most this share of the time: the interval grows with a large state.
COMMIT_SHARE = 0.02
# Ranks find out so often whether one is to join or leave; half a second costs a small collective.
CHECK_INTERVAL_S = 0.5


class Commits:
    """The newest committed state of this rank; equal on all ranks that have the same number."""

    def __init__(self) -> None:
        self.number = 0
        self._state: State = {}

    def keep(self, state: State) -> None:
        """Commit a state; whole or not at all."""
        self._state, self.number = to_host(state, copy=True), self.number + 1

    def state(self) -> State:
        """A copy of what was committed."""
        return dict(to_host(self._state, copy=True))

    def receive(self, ranks: Communicator) -> None:
        """Take over the commit of rank 0. Collective.

        It travels as the bytes of a checkpoint file; nothing is unpickled.
        """
        own = {"number": self.number, "state": self._state}
        content = serialized(own) if ranks.rank == 0 else b""
        received = torch.empty(ranks.from_rank_0(len(content)), dtype=torch.uint8)
        if ranks.rank == 0:
            received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for chunk in torch.split(received, CHUNK_BYTES):
            ranks.broadcast_([chunk])
        if ranks.rank != 0:
            commit = deserialized(received.numpy().tobytes())
            self._state, self.number = commit["state"], commit["number"]


@dataclass
class CheckedSteps:
    """The commit point of one group: mostly counts, and now and then agrees with the other ranks.

    Ranks can only leave the loop together, after the same step. So the number of steps until the
    next check is computed from what all of them know: the mean time of a step.
    """

    link: RankLink
    ranks: Communicator
    session: ElasticSession
    commits: Commits
    _num_steps: int = 0
    _steps_to_check: int = 1
    _checked_at: float = field(default_factory=time.monotonic)
    _uncommitted_s: float = 0.0
    _commit_cost_s: float = 0.0

    def __call__(self) -> None:
        """See `CommitPoint`."""
        self._num_steps += 1
        if self._num_steps >= self._steps_to_check:
            self._check()

    def _check(self) -> None:
        now = time.monotonic()
        asked = self.link.regroup_asked, self.link.leave_asked
        took_s = now - self._checked_at, self._commit_cost_s
        summed = self.ranks.sum(np.array([*asked, *took_s], dtype=np.float64))
        regroup, leave = bool(summed[0]), bool(summed[1])
        elapsed_s, cost_s = (float(total) / self.ranks.size for total in summed[2:])
        self._uncommitted_s += elapsed_s
        interval_s = max(COMMIT_INTERVAL_S, cost_s / COMMIT_SHARE)
        if regroup or leave or self._uncommitted_s >= interval_s:
            started = time.monotonic()
            self.commits.keep(self.session.snapshot())
            self._commit_cost_s = time.monotonic() - started
            self._uncommitted_s = 0.0
        self.link.send(Pulse(commit=self.commits.number))
        if leave:
            LOGGER.info("a rank is to leave: a checkpoint of commit %d", self.commits.number)
            self.session.checkpoint(self.commits.state())
            self.ranks.minimum(1)  # all stay until it is whole: who leaves may be who writes
        if regroup or leave:
            raise Regroup
        mean_s = max(elapsed_s / self._num_steps, 1e-6)
        steps = round(min(CHECK_INTERVAL_S, interval_s) / mean_s)
        self._steps_to_check = min(max(1, steps), MAX_STEPS_BETWEEN_CHECKS)
        self._num_steps = 0
        self._checked_at = now
