from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.strategies.precision import LossScale, autocast


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
    assert ours.num_skipped == sum(overflows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_fp16_scales_its_loss(precision: str) -> None:
    scale = LossScale.of(precision)  # type: ignore[arg-type]
    for _ in range(3000):
        scale.after_step()
    assert scale.factor == 1.0
    assert not scale.can_fall


def test_a_scale_goes_on_from_a_checkpoint() -> None:
    scale = LossScale.of("fp16")
    for _ in range(3):
        scale.after_overflow()
    scale.after_step()
    again = LossScale.of("fp16")
    again.load(scale.state())
    assert again == scale


def test_a_checkpoint_of_another_precision_leaves_the_scale_as_it_is() -> None:
    scale = LossScale.of("fp16")
    scale.load({})
    assert scale == LossScale.of("fp16")
    plain = LossScale.of("fp32")
    plain.load(LossScale.of("fp16").state())
    assert plain.factor == 1.0


def test_products_are_in_sixteen_bits_where_that_is_asked_for() -> None:
    rows = torch.ones(2, 2)
    cpu = torch.device("cpu")
    kinds = {}
    for precision in ("fp32", "bf16", "fp16"):
        with autocast(precision, cpu):  # type: ignore[arg-type]
            kinds[precision] = (rows @ rows).dtype
    assert kinds == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
