from __future__ import annotations

import copy

import torch
from torch import nn

from tasks.training.strategies.blocks import blocks_of, checkpoint_activations
from tests.support.ranks.strategy_cases import SmallNetwork, global_batch


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
