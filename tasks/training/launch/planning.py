"""Ranks and threads of a run: what the configuration says, never what a measurement found."""

from __future__ import annotations

import logging

from pydantic import PositiveInt

from tasks.contracts.base import Contract
from tasks.training.config import TrainingConfig
from tasks.training.launch.host import Host

LOGGER = logging.getLogger(__name__)


class RankPlan(Contract):
    """Ranks on a host, and the threads of each; recorded with the run."""

    num_ranks: PositiveInt
    threads_per_rank: PositiveInt

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        return f"{ranks} x {self.threads_per_rank} thread{'s' * (self.threads_per_rank > 1)}"


def plan_ranks(config: TrainingConfig, host: Host) -> RankPlan:
    """Ranks and threads for a run on this host.

    The ranks, and with them what is computed, follow from the configuration alone. Threads that it
    leaves open are the host's cores, divided: they change the last digits of a sum and no more.
    """
    ranks, given = config.num_ranks, config.launch.threads_per_rank
    threads = max(1, host.num_cores // ranks) if given == "auto" else given
    plan = RankPlan(num_ranks=ranks, threads_per_rank=threads)
    if config.device == "cuda" and ranks < host.num_gpus:
        LOGGER.warning(
            "%s: %d of %d GPUs stay idle. Set launch.ranks=%d for one rank a GPU; another number "
            "of ranks makes another model",
            plan,
            host.num_gpus - ranks,
            host.num_gpus,
            host.num_gpus,
        )
    return plan
