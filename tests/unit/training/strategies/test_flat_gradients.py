from __future__ import annotations

import pytest
import torch
from torch import nn

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.flat_gradients import FlatGradients, ring_bytes
from tests.support.ranks.strategy_cases import SmallNetwork, global_batch


def test_backward_writes_all_gradients_into_one_tensor() -> None:
    network, plain = SmallNetwork(), SmallNetwork()
    plain.load_state_dict(network.state_dict())
    gradients = FlatGradients(network.named_parameters())
    for either in (network, plain):
        either(*global_batch(0).inputs).sum().backward()
    expected = [p.grad.flatten() for p in plain.parameters() if p.grad is not None]
    assert torch.equal(gradients.flat, torch.cat(expected))
    gradients.flat.fill_(2.0)
    assert all((p.grad == 2.0).all() for p in network.parameters() if p.grad is not None)
    gradients.clear()
    assert not gradients.flat.any()


def test_frozen_parameters_have_no_part_in_the_exchange() -> None:
    network = SmallNetwork()
    network.entry.requires_grad_(False)
    gradients = FlatGradients(network.named_parameters())
    assert network.entry.weight.grad is None
    assert not any(name.startswith("entry") for name in gradients.views)
    assert gradients.flat.numel() == sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_a_network_with_nothing_to_train_is_refused_with_a_sentence() -> None:
    network = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(TrainingError, match="no parameter to train"):
        FlatGradients(network.named_parameters())


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 1000), (4, 1500)])
def test_a_ring_sends_nearly_twice_the_buffer_at_most(size: int, expected: int) -> None:
    assert ring_bytes(1000, size) == expected
