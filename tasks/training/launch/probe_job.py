"""What the probe measures, and how its driver and its ranks talk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract
from tasks.training.config import TrainingConfig
from tasks.training.strategies.config import StrategyConfig

JOB_FILE = "probe.json"
TURN_FILE = "turn-{}"
SAYS = "PROBE "
# On purpose low, so that a run which may be long is not taken for a short one: a core of a small
# server does ten times as many operations, and an empty step takes a third of the time.
SLOW_CORE_FLOPS = 2e9
SLOW_STEP_S = 3e-3
OPERATIONS_PER_WEIGHT = 6  # a row's multiplication and addition, forward and twice backward


@dataclass(frozen=True)
class Layout:
    """Ranks on a host, and the threads of each."""

    num_ranks: int
    threads: int

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        return f"{ranks} x {self.threads} thread{'s' * (self.threads > 1)}"


class ProbeJob(Contract):
    """A run as far as its speed goes: shape of the network, batch, and how ranks share the work."""

    category_sizes: tuple[PositiveInt, ...]
    """Categories of each column."""
    num_numbers: NonNegativeInt
    """Numeric columns; all are taken to miss values at times."""
    rows_per_step: PositiveInt
    """Of the global batch."""
    num_steps: PositiveInt
    """Of all epochs."""
    training: TrainingConfig
    strategy: StrategyConfig

    @property
    def speed(self) -> dict[str, object]:
        """All that its speed depends on; the number of steps does not belong to it."""
        return self.model_dump(mode="json", exclude={"num_steps"})

    def seconds_at_most(self, num_cores: int) -> float:
        """A rough and generous guess at how long the run would take."""
        columns = len(self.category_sizes) * self.training.max_embedding_size
        inputs = columns + self.num_numbers * (self.training.num_bins + 1)
        sizes = (inputs, *self.training.hidden_sizes, 1)
        weights = sum(before * after for before, after in itertools.pairwise(sizes))
        operations = OPERATIONS_PER_WEIGHT * weights * self.rows_per_step
        return self.num_steps * (SLOW_STEP_S + operations / (SLOW_CORE_FLOPS * num_cores))
