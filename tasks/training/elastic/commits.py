"""What a rank keeps in memory, when it keeps it, and how it reaches a rank that has nothing."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.link import RankLink
from tasks.training.elastic.messages import Pulse
from tasks.training.elastic.session import ElasticSession, Regroup
from tasks.training.strategies.base import Communicator, State

LOGGER = logging.getLogger(__name__)
# A broadcast of more than 2 GB at once is more than some transports take.
CHUNK_BYTES = 1 << 28
MAX_STEPS_BETWEEN_CHECKS = 100_000


class Commits:
    """The newest committed state of this rank; equal on all ranks that have the same number."""

    def __init__(self) -> None:
        self.number = 0
        self._state: State = {}

    def keep(self, state: State) -> None:
        """Commit a state; whole or not at all."""
        copied = copy_of(state)
        self._state, self.number = copied, self.number + 1

    def state(self) -> State:
        """A copy of what was committed."""
        copied: State = copy_of(self._state)
        return copied

    def receive(self, exchange: Communicator) -> None:
        """Take over the commit of rank 0. Collective.

        It travels as the bytes of a checkpoint file; nothing is unpickled.
        """
        content = b""
        if exchange.rank == 0:
            stream = io.BytesIO()
            torch.save({"number": self.number, "state": self._state}, stream)
            content = stream.getvalue()
        size = exchange.from_rank_0(len(content))
        received = torch.empty(size, dtype=torch.uint8)
        if exchange.rank == 0:
            received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for chunk in torch.split(received, CHUNK_BYTES):
            exchange.broadcast_([chunk])
        if exchange.rank != 0:
            commit = torch.load(io.BytesIO(received.numpy().tobytes()), weights_only=True)
            self._state, self.number = commit["state"], commit["number"]


def copy_of(value: Any) -> Any:
    """A copy that shares no tensor, list or dict with `value`; tensors are copied to the CPU."""
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case dict():
            return {key: copy_of(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(copy_of(item) for item in value)
        case _:
            return value


class CheckedSteps:
    """The commit point of one group: mostly counts, and now and then agrees with the other ranks.

    Ranks can only leave the loop together, after the same step. So the number of steps until the
    next check is computed from what all of them know: the mean time of a step.
    """

    def __init__(
        self,
        group: int,
        link: RankLink,
        exchange: Communicator,
        session: ElasticSession,
        commits: Commits,
        config: ElasticConfig,
    ) -> None:
        self._group = group
        self._link = link
        self._exchange = exchange
        self._session = session
        self._commits = commits
        self._config = config
        self._num_steps = 0
        self._steps_to_check = 1
        self._busy_s = 0.0
        self._checked_at = time.monotonic()
        self._uncommitted_s = 0.0
        self._commit_cost_s = 0.0

    def __call__(self, busy_s: float) -> None:
        """See `session.CommitPoint`."""
        self._num_steps += 1
        self._busy_s += busy_s
        if self._num_steps >= self._steps_to_check:
            self._check()

    def _check(self) -> None:
        now = time.monotonic()
        own = (
            self._link.regroup_asked,
            self._link.leave_asked,
            now - self._checked_at,
            self._commit_cost_s,
        )
        summed = self._exchange.sum(np.array(own, dtype=np.float64))
        regroup, leave = bool(summed[0]), bool(summed[1])
        elapsed_s, cost_s = (float(total) / self._exchange.size for total in summed[2:])
        self._uncommitted_s += elapsed_s
        interval_s = max(self._config.commit_interval_s, cost_s / self._config.commit_share)
        if regroup or leave or self._uncommitted_s >= interval_s:
            self._commit()
        self._tell()
        if leave:
            self._write_checkpoint()
        if regroup or leave:
            raise Regroup
        mean_s = max(elapsed_s / self._num_steps, 1e-6)
        steps = round(min(self._config.check_interval_s, interval_s) / mean_s)
        self._steps_to_check = min(max(1, steps), MAX_STEPS_BETWEEN_CHECKS)
        self._num_steps = 0
        self._busy_s = 0.0
        self._checked_at = now

    def _commit(self) -> None:
        started = time.monotonic()
        self._commits.keep(self._session.snapshot())
        self._commit_cost_s = time.monotonic() - started
        self._uncommitted_s = 0.0

    def _tell(self) -> None:
        busy_s = self._busy_s / self._num_steps
        self._link.send(Pulse(group=self._group, commit=self._commits.number, busy_s=busy_s))

    def _write_checkpoint(self) -> None:
        """All ranks stay until it is whole: the one that leaves may be the one that writes."""
        LOGGER.info("a rank is to leave: writing a checkpoint of commit %d", self._commits.number)
        self._session.checkpoint(self._commits.state())
        self._exchange.minimum(1)
