from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tasks.kernel.errors import ConfigurationError
from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.data.preprocess import Preprocessing
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.tensor_parallel import CutDropout, TensorParallel
from tests.support.training.thread_ranks import ThreadCommunicator, on_threads

EDGES = np.linspace(-1, 1, 5).astype(np.float32)


def network(*hidden_sizes: int) -> TabularNetwork:
    vocabularies = (np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))
    preprocessing = Preprocessing(vocabularies, (EDGES, EDGES), flagged=(0,))
    return TabularNetwork(preprocessing, TrainingConfig(hidden_sizes=hidden_sizes))


def test_cut_dropout_drops_what_dropout_drops() -> None:
    units = torch.randn(7, 12)
    torch.manual_seed(3)
    expected = nn.Dropout(0.4)(units)
    parts = []
    for part, own in enumerate(units.chunk(3, dim=1)):
        torch.manual_seed(3)
        parts.append(CutDropout(0.4, part, 3)(own))
    assert torch.equal(torch.cat(parts, dim=1), expected)
    assert torch.equal(CutDropout(0.4, 0, 3).eval()(units), units)


@pytest.mark.parametrize(
    ("hidden_sizes", "num_ranks", "sentence"),
    [
        ((15, 16), 2, r"perceptron\.0 has 15 outputs, which do not divide over tensor_parallel"),
        ((16, 8), 3, r"3 rank\(s\) do not divide into replicas of tensor_parallel_size=2"),
    ],
)
def test_what_cannot_be_cut_is_rejected(
    hidden_sizes: tuple[int, ...], num_ranks: int, sentence: str
) -> None:
    config = StrategyConfig(name="tensor-parallel", tensor_parallel_size=2)

    def part(ranks: ThreadCommunicator) -> None:
        with pytest.raises(ConfigurationError, match=sentence):
            TensorParallel(
                config, ranks, network(*hidden_sizes), _losses, _sgd, torch.device("cpu")
            )

    on_threads(num_ranks, part)


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


def _sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters])
