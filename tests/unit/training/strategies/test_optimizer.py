from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tasks.training.config import TrainingConfig
from tasks.training.core import objective
from tasks.training.strategies.optimizer import FlatGradients, LossScale, NamedOptimizer
from tests.support.ranks.strategy_cases import SmallNetwork, adamw, global_batch


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


def trained(network: nn.Module, optimizer: NamedOptimizer, steps: int) -> None:
    for step in range(steps):
        network.zero_grad()
        network(*global_batch(step).inputs).square().sum().backward()
        optimizer.step(0.01)


# Its groups are in another order than the network's parameters.
IN_TWO_GROUPS = partial(objective.adamw, config=TrainingConfig())


@pytest.mark.parametrize("build", [adamw, IN_TWO_GROUPS])
def test_an_optimizer_goes_on_from_the_state_of_another(build: object) -> None:
    networks = [SmallNetwork(), SmallNetwork()]
    first, second = (NamedOptimizer(build, n.named_parameters()) for n in networks)  # type: ignore[arg-type]
    trained(networks[0], first, 3)
    networks[1].load_state_dict(networks[0].state_dict())
    second.load(first.state())
    for network, optimizer in zip(networks, (first, second), strict=True):
        trained(network, optimizer, 2)
    for ours, theirs in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_is_known_by_name_and_holds_copies() -> None:
    network = SmallNetwork()
    optimizer = NamedOptimizer(adamw, network.named_parameters())
    assert optimizer.state() == {}
    trained(network, optimizer, 1)
    state = optimizer.state()
    names = {name for name, _ in network.named_parameters()}
    assert {key.rpartition("/")[0] for key in state} == names
    assert {key.rpartition("/")[2] for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    kept = state["entry.weight/exp_avg"].clone()
    second = NamedOptimizer(adamw, network.named_parameters())
    second.load(state)
    trained(network, second, 1)
    assert torch.equal(state["entry.weight/exp_avg"], kept)


@given(st.lists(st.booleans(), max_size=60))
def test_the_loss_scale_is_that_of_torchs_own_scaler(overflows: list[bool]) -> None:
    ours = LossScale(2.0**10, growth_steps=4)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        theirs.scale(torch.ones(1))
        parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.after_overflow() if overflow else ours.after_step()
        assert ours.factor == theirs.get_scale()
    again = LossScale(2.0**16, growth_steps=4)
    again.load(ours.state())
    assert again == ours
