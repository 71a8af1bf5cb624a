"""Averaging in the background: ranks go on stepping while their weights travel.

After Shen et al., "Faster Distributed Deep Net Training: Computation and Communication Decoupled
Stochastic Gradient Descent" (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tasks.training.strategies.base import State
from tasks.training.strategies.flat_gradients import ring_bytes
from tasks.training.strategies.local_sgd import LocalSgd


@dataclass(frozen=True)
class Averaging:
    """One averaging that is under way."""

    given: Tensor
    """The rank's weights when it began."""
    summed: Tensor
    """Their sum over all ranks, once `wait` has returned."""
    wait: Callable[[], None]


class AsynchronousSgd(LocalSgd):
    """At the end of a round of `local_steps` steps weights are sent off; the next round goes on.

    At that one's end the mean has come, and a rank adds to its weights what the mean differs by
    from what it gave. So an exchange has a whole round's time, a rank waits only for one that is a
    round behind, and averaged weights are one round old. What is computed does not depend on how
    fast the ranks are. Two more copies of the weights are held.
    """

    name: ClassVar[str] = "asynchronous"

    def _prepare(self) -> None:
        super()._prepare()
        self._under_way: Averaging | None = None

    def _end_round(self) -> None:
        self._take_over_mean()
        summed = self.weights.flat.clone()
        given = summed.clone()
        wait = self.exchange.begin_sum_(summed, "weights in the background")
        self._under_way = Averaging(given, summed, wait)
        self.wire_bytes += ring_bytes(summed.nbytes, self.exchange.size)

    def _take_over_mean(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            mean = self._under_way.summed.div_(self.exchange.size)
            self.weights.flat.add_(mean.sub_(self._under_way.given))
            self._under_way = None

    def _meet(self) -> None:
        self._take_over_mean()
        super()._meet()

    def load(self, state: State) -> None:
        """See `Strategy.load`; an averaging that is under way no longer counts."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        super().load(state)
