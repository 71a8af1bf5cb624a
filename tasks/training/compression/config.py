"""How a smaller network is to be made from a registered one."""

from pydantic import Field, PositiveInt

from tasks.contracts.training import CompressionMethod
from tasks.kernel.values import Described


class CompressionConfig(Described):
    """Pruning, distillation or both, of the champion or another version; kept with the result."""

    method: CompressionMethod = "pruning"
    """`pruning`: hidden units of least weight go, and the rest is trained on. `distillation`: a
    small network learns from the labels and from the large one's scores. `pruning-distillation`:
    what pruning left learns from both."""
    pruned_share: float = Field(default=0.75, gt=0, lt=1)
    """Of pruning: share of the units of each hidden layer that go."""
    hidden_sizes: tuple[PositiveInt, ...] = Field(default=(64, 32), min_length=1, max_length=8)
    """Of distillation alone: units of each hidden layer of the small network."""
    max_embedding_size: int | None = Field(default=None, ge=1, le=512)
    """Upper bound of a category's embedding; none: the large network's. Pruning presses the
    embeddings into it by their singular values."""
    num_bins: int | None = Field(default=None, ge=2, le=256)
    """Bins of each number's encoding; none: the large network's. Pruning writes each number's part
    down anew on the fewer bins."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Share of hidden units dropped in training; none: the large network's."""
    temperature: float = Field(default=2.0, ge=1, le=100)
    """Of distillation: logits are divided by it, so that small probabilities count."""
    teacher_weight: float = Field(default=0.5, gt=0, le=1)
    """Of distillation: share of the loss that the large
    network's scores have; the labels have the rest."""
    max_epochs: int = Field(default=8, ge=1, le=1000, description="Passes over the training rows.")

    @property
    def prunes(self) -> bool:
        """Whether units are taken out of the large network."""
        return self.method != "distillation"

    @property
    def distils(self) -> bool:
        """Whether the large network's scores are learnt."""
        return self.method != "pruning"
