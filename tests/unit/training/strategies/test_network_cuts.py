"""What the project's network says of how it can be cut."""

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
from tasks.training.strategies.base import Batch
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import DataParallel
from tasks.training.strategies.pipeline_parallel import Judged, PipelineParallel, filled_up
from tasks.training.strategies.tensor_parallel import CutDropout, TensorParallel
from tests.support.training.thread_ranks import ThreadExchange, on_threads

EDGES = np.linspace(-1, 1, 5).astype(np.float32)
INPUTS = (torch.tensor([[0, 2], [3, 1], [1, 0]]), torch.randn(3, 2))


def network(*hidden_sizes: int, dropout: float = 0.3) -> TabularNetwork:
    vocabularies = (np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))
    preprocessing = Preprocessing(vocabularies, (EDGES, EDGES), flagged=(0,))
    config = TrainingConfig(hidden_sizes=hidden_sizes, dropout=dropout, category_dropout=0.2)
    torch.manual_seed(0)
    return TabularNetwork(preprocessing, config)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_one_after_the_other_are_the_network(num_stages: int) -> None:
    whole = network(16, 8, 4)
    stages = whole.pipeline_stages(num_stages)
    assert len(stages) == num_stages
    for training in (False, True):
        whole.train(training)
        torch.manual_seed(5)
        expected = whole(*INPUTS)
        torch.manual_seed(5)
        passed: Tensor = stages[0].train(training)(*INPUTS)
        for stage in stages[1:]:
            passed = stage.train(training)(passed)
        assert torch.equal(passed, expected)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_each_parameter_is_in_exactly_one_stage(num_stages: int) -> None:
    whole = network(16, 8, 4)
    of_stages = [p for stage in whole.pipeline_stages(num_stages) for p in stage.parameters()]
    assert sorted(map(id, of_stages)) == sorted(map(id, whole.parameters()))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"pipeline_stages=3, but .* has 2 blocks"):
        network(16).pipeline_stages(3)


def test_layers_are_cut_in_pairs_with_what_is_between_them() -> None:
    assert network(16, 8).tensor_parallel_plan(2) == {
        "perceptron.0": "outputs",
        "perceptron.2": "units",
        "perceptron.3": "inputs",
    }
    of_three = network(16, 8, 4).tensor_parallel_plan(2)
    assert of_three["perceptron.6"] == "outputs"
    assert of_three["perceptron.9"] == "inputs"  # the layer with the one output


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


def test_rows_that_fill_up_a_batch_have_no_loss_and_no_gradient() -> None:
    batch = Batch((torch.ones(3, 2),), torch.ones(3))
    filled = filled_up(batch, 5)
    assert filled.num_rows == 5
    assert filled.inputs[0].shape == (5, 2)
    judged = Judged(filled.labels, batch.num_rows, factor=0.5)
    losses = torch.tensor([1.0, 2.0, 3.0, torch.nan, torch.inf], requires_grad=True)
    loss = judged.loss(losses, torch.arange(5))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(judged.total) == 6.0
    assert loss.item() == 3.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0.5, 0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("kind", [TensorParallel, PipelineParallel])
def test_ranks_that_talk_by_another_library_are_refused(kind: type[DataParallel]) -> None:
    config = StrategyConfig.model_validate(
        {"name": "tensor-parallel", "tensor_parallel_size": 2}
        if kind is TensorParallel
        else {"name": "pipeline-parallel", "pipeline_stages": 2}
    )

    def part(exchange: ThreadExchange) -> str:
        with pytest.raises(ConfigurationError, match=r"=2 needs torch\.distributed") as caught:
            kind(config, exchange, network(16, 8), _losses, _sgd, torch.device("cpu"))
        return str(caught.value)

    assert all("ranks talk by threads" in said for said in on_threads(2, part))


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


def _sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters])
