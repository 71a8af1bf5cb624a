"""What elastic training asks of the training loop, so that ranks may come and go under it.

The order of calls on every rank, again for each new group of ranks:

    session.rejoin(exchange)   the ranks have changed: take the shards that are now mine
    session.restore(state)     go back (or forward) to what was committed
    session.run(commit_point)  train on, and call commit_point between two steps

A rank that is lost in the middle makes a collective fail on the others: the error must pass out of
`run`. What happened after the last commit is then done again by those that are left.
"""

from __future__ import annotations

from typing import Protocol

from tasks.training.strategies.base import Communicator, State


class Regroup(BaseException):
    """Raised by the commit point where the ranks change; must pass out of `run` on every rank.

    No `Exception`, so that nothing that handles errors of training takes it for one.
    """


class CommitPoint(Protocol):
    """What `run` is handed."""

    def __call__(self, busy_s: float) -> None:
        """Say that a step is done; every rank must call it after the same steps.

        Now and then it commits: calls `snapshot` and keeps what it returns. Most calls cost a
        comparison; one in a second is a small collective.

        Args:
            busy_s: seconds of this step that the rank worked itself (reading and computing), not
                those in which it waited for others. A rank that is busy for much longer than the
                others is named as a straggler.

        Raises:
            Regroup: a rank is to join or to leave; all is committed.
        """


class ElasticSession(Protocol):
    """One rank's training as elastic training sees it. All methods are collective.

    May be built on a rank that joins hours after the start. So the constructor must not use
    collectives, and what the first ranks agreed on then (such as fitted preprocessing) is either
    part of the state or agreed on again in `rejoin`, by new and old ranks alike.
    """

    def rejoin(self, exchange: Communicator) -> None:
        """Take part in a new group: other ranks, another size, maybe another rank for this one.

        Args:
            exchange: of the new group; any earlier one is dead and must not be used.
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

        Called when a rank has been told that it will be ended soon.
        """
