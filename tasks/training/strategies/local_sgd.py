"""Ranks that step alone and average their weights: every so many steps, or in the background.

After Stich, "Local SGD Converges Fast and Communicates Little" (2018), and Shen et al., "Faster
Distributed Deep Net Training: Computation and Communication Decoupled SGD" (2019).
"""

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import Batch, State
from tasks.training.strategies.data_parallel import HorovodStrategy
from tasks.training.strategies.optimizer import ring_bytes


class LocalSgd(HorovodStrategy):
    """Each rank steps on its own rows; every `local_steps` steps all take the mean of the weights.

    A rank's gradient is its share of the global one times the number of ranks: the gradient of its
    own rows where all ranks have equally many. With plain SGD and one local step this is
    synchronous training.

    Each rank keeps its own optimizer state, such as Adam's moments, through the averaging. Before
    anything is evaluated or kept in a checkpoint the weights are averaged too, before a checkpoint
    also the optimizer state, and training goes on from there: a run that was cut off goes on as if
    it had not been. Bytes are those of synchronous training over `local_steps`.
    """

    def _prepare(self) -> None:
        super()._prepare()
        # Parameters become views of one tensor, so that one collective averages them.
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        self._weights = parameters_to_vector(parameters).detach()
        vector_to_parameters(self._weights, parameters)
        self._num_steps_alone = 0
        self._weights_differ = self._moments_differ = False

    def _sum_gradients(self) -> None:
        self.gradients.flat.mul_(self.ranks.size)

    def _step(self, norm: float, learning_rate: float) -> None:
        super()._step(norm, learning_rate)
        self._weights_differ = self._moments_differ = True
        self._num_steps_alone += 1
        if self._num_steps_alone == self.config.local_steps:
            with self.phase("exchange"):
                self._end_round()
            self._num_steps_alone = 0

    def _end_round(self) -> None:
        self._average_(self._weights)
        self._weights_differ = False

    def _average_(self, tensor: Tensor) -> None:
        self.ranks.sum_(tensor)
        tensor.div_(self.ranks.size)
        self.wire_bytes += ring_bytes(tensor.nbytes, self.ranks.size)

    def _meet(self) -> None:
        """Give all ranks equal weights now, where they have stepped since the last time."""
        if self._weights_differ:
            self._average_(self._weights)
            self._weights_differ = False
            self._num_steps_alone = 0

    def _name_the_source(self, batch: Batch) -> NoReturn:
        # The others know nothing of this rank's gradient, so this is no collective.
        raise TrainingError(
            f"rank {self.ranks.rank}: the gradient of its own {batch.num_rows} rows is NaN or "
            "infinite; expected finite numbers. Its weights were not changed. Look for NaN or "
            "extreme values in these rows, or lower the learning rate"
        )

    def evaluate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """See `Strategy.evaluate`."""
        self._meet()
        return super().evaluate(inputs)

    def state(self) -> State:
        """See `Strategy.state`."""
        self._meet()
        if self._moments_differ:
            for moment in self._optimizer.tensors():
                self._average_(moment)
            self._moments_differ = False
        return super().state()

    def load(self, state: State) -> None:
        """See `Strategy.load`."""
        super().load(state)
        self._num_steps_alone = 0
        self._weights_differ = self._moments_differ = False

    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        self._meet()
        return super().checksum()


class AsynchronousSgd(LocalSgd):
    """At the end of a round of `local_steps` steps weights are sent off; the next round goes on.

    At that one's end the mean has come, and a rank adds to its weights what the mean differs by
    from what it gave. So a sum has a whole round's time, a rank waits only for one that is a round
    behind, and averaged weights are one round old. Results do not depend on how fast the ranks are.
    Two more copies of the weights are held.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._under_way: tuple[Tensor, Tensor, Callable[[], None]] | None = None
        """What this rank gave, the sum over all ranks, and the wait for it."""

    def _end_round(self) -> None:
        self._take_over_mean()
        given, summed = self._weights.clone(), self._weights.clone()
        self._under_way = given, summed, self.ranks.begin_sum_(summed, "weights in the background")
        self.wire_bytes += ring_bytes(summed.nbytes, self.ranks.size)

    def _take_over_mean(self) -> None:
        if self._under_way is not None:
            given, summed, wait = self._under_way
            wait()
            self._weights.add_(summed.div_(self.ranks.size).sub_(given))
            self._under_way = None

    def _meet(self) -> None:
        self._take_over_mean()
        super()._meet()

    def load(self, state: State) -> None:
        """See `Strategy.load`; an averaging that is under way no longer counts."""
        self._take_over_mean()
        super().load(state)
