from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tasks.kernel.errors import ConfigurationError
from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.data.preprocess import Preprocessing
from tasks.training.strategies.base import Batch, cut_evenly
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import DataParallel, blocks_of, checkpoint_activations
from tasks.training.strategies.model_parallel import (
    CutDropout,
    Judged,
    PipelineParallel,
    TensorParallel,
    filled_up,
)
from tests.support.ranks.strategy_cases import SmallNetwork, global_batch
from tests.support.training.thread_ranks import ThreadCommunicator, on_threads

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

    def part(exchange: ThreadCommunicator) -> str:
        with pytest.raises(ConfigurationError, match=r"=2 needs torch\.distributed") as caught:
            kind(config, exchange, network(16, 8), _losses, _sgd, torch.device("cpu"))
        return str(caught.value)

    assert all("communicate by threads" in said for said in on_threads(2, part))


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


def _sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters])


def largest_part(sizes: list[int], cuts: tuple[int, ...]) -> int:
    edges = [0, *cuts, len(sizes)]
    return max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_smaller_largest_part(sizes: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(sizes)))
    parts = cut_evenly(sizes, num_parts)
    assert len(parts) == num_parts
    assert [n for part in parts for n in range(len(sizes))[part]] == list(range(len(sizes)))
    assert all(part.start < part.stop for part in parts)
    best = min(
        largest_part(sizes, cuts)
        for cuts in itertools.combinations(range(1, len(sizes)), num_parts - 1)
    )
    assert largest_part(sizes, tuple(part.start for part in parts[1:])) == best


def test_blocks_are_the_members_of_lists_and_the_other_parts_with_parameters() -> None:
    network = SmallNetwork()
    assert blocks_of(network) == [network.entry, *network.blocks, network.head]


def test_the_layers_of_an_encoder_are_blocks_but_not_what_is_in_them() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    network = nn.Sequential(nn.Embedding(5, 8), encoder, nn.ReLU())
    assert blocks_of(network) == [network[0], *encoder.layers]


def test_a_network_of_bare_parameters_has_no_blocks() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.more = nn.ParameterList([nn.Parameter(torch.ones(2))])

    assert blocks_of(Bare()) == []


def test_checkpointing_changes_no_gradient_no_name_and_no_output() -> None:
    network = SmallNetwork()
    lean = copy.deepcopy(network)
    checkpoint_activations(lean)
    batch = global_batch(0)
    for either in (network, lean):
        either(*batch.inputs).sum().backward()
    for (name, ours), (name_of_lean, theirs) in zip(
        network.named_parameters(), lean.named_parameters(), strict=True
    ):
        assert name == name_of_lean
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(network.eval()(*batch.inputs), lean.eval()(*batch.inputs))


def test_checkpointing_keeps_fewer_activations() -> None:
    network, lean = SmallNetwork(), SmallNetwork()
    checkpoint_activations(lean)
    kept = []
    for either in (network, lean):
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            either(*global_batch(0).inputs)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_a_copy_of_a_checkpointed_network_computes_with_its_own_weights() -> None:
    network = SmallNetwork()
    checkpoint_activations(network)
    twin = copy.deepcopy(network).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert twin(*global_batch(0).inputs).abs().sum() > 0
