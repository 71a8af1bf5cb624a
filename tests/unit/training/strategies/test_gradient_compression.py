import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.training.strategies.base import State
from tasks.training.strategies.gradient_compression import (
    RESIDUAL,
    GradientSum,
    HalfPrecisionSum,
    PowerSgdSum,
)
from tests.support.suite.examples import examples
from tests.support.training.thread_ranks import ThreadCommunicator, gradients_of, on_threads

SHAPES = {"matrix": (12, 9), "bias": (12,), "cube": (4, 3, 5), "scalar": ()}
NUM_VALUES = sum(math.prod(shape) for shape in SHAPES.values())
POWER_SGD = partial(PowerSgdSum, rank=2)


def gradient(rank: int, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(97 * rank + step)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat_of(tensors: dict[str, Tensor]) -> Tensor:
    return gradients_of(tensors).flat


def left_out(state: State) -> Tensor:
    residual = state[RESIDUAL]
    return flat_of({name: residual[name] for name in SHAPES} if residual else gradient(0, 0, 0.0))


@examples(15)
@given(
    size=st.integers(1, 4), num_steps=st.integers(1, 5), scale=st.sampled_from([1e-12, 1.0, 1e12])
)
def test_nothing_is_lost_all_that_went_in_came_out_or_is_left_over(
    size: int, num_steps: int, scale: float
) -> None:
    def part(ranks: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        compressed = POWER_SGD(ranks)
        came_out = torch.zeros(NUM_VALUES, dtype=torch.float64)
        for step in range(num_steps):
            gradients = gradients_of(gradient(ranks.rank, step, scale))
            compressed.sum_(gradients)
            came_out += gradients.flat
        return came_out, left_out(compressed.state())

    went_in = sum(
        flat_of(gradient(rank, step, scale)).double()
        for rank in range(size)
        for step in range(num_steps)
    )
    results = on_threads(size, part)
    for came_out, residual in results:
        assert torch.equal(came_out, results[0][0])
        torch.testing.assert_close(
            came_out + residual, went_in, rtol=1e-4, atol=1e-4 * scale * size * num_steps
        )


def test_what_was_left_out_survives_another_number_of_ranks() -> None:
    def before(ranks: ThreadCommunicator) -> State:
        compressed = POWER_SGD(ranks)
        compressed.sum_(gradients_of(gradient(ranks.rank, 0)))
        return compressed.state()

    state = on_threads(3, before)[0]

    def after(ranks: ThreadCommunicator) -> Tensor:
        compressed = POWER_SGD(ranks)
        compressed.load(state)
        torch.testing.assert_close(left_out(compressed.state()), left_out(state))
        gradients = gradients_of(gradient(0, 0, 0.0))
        compressed.sum_(gradients)
        return gradients.flat + left_out(compressed.state())

    for size in (1, 2, 4):
        for of_rank in on_threads(size, after):
            torch.testing.assert_close(of_rank, left_out(state), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("build", [POWER_SGD, HalfPrecisionSum])
def test_what_is_no_number_on_one_rank_is_none_on_all_and_spoils_no_later_step(
    build: Callable[[ThreadCommunicator], GradientSum], number: float
) -> None:
    def part(ranks: ThreadCommunicator) -> tuple[bool, bool]:
        compressed = build(ranks)
        compressed.sum_(gradients_of(gradient(ranks.rank, 0)))
        broken = gradients_of(gradient(ranks.rank, 1))
        if ranks.rank == 1:
            broken.flat[3] = number
        compressed.sum_(broken)
        sound = gradients_of(gradient(ranks.rank, 2))
        compressed.sum_(sound)
        return bool(broken.flat.isnan().all()), bool(sound.flat.isfinite().all())

    assert on_threads(2, part) == [(True, True)] * 2


@given(size=st.integers(1, 4), exponent=st.integers(-140, 96), spread=st.integers(0, 8))
def test_half_precision_keeps_11_bits_and_never_overflows(
    size: int, exponent: int, spread: int
) -> None:
    scale = 2.0**exponent
    shares = [
        torch.randn(50, generator=torch.Generator().manual_seed(rank))
        * scale
        * 2.0 ** (spread * rank)
        for rank in range(size)
    ]

    def part(ranks: ThreadCommunicator) -> tuple[Tensor, int]:
        gradients = gradients_of({"all": shares[ranks.rank]})
        HalfPrecisionSum(ranks).sum_(gradients)
        return gradients.flat, ranks.given_bytes

    expected = torch.stack(shares).double().sum(0)
    largest = max(float(share.abs().max()) for share in shares)
    for summed, given_bytes in on_threads(size, part):
        assert summed.isfinite().all()
        # Each of the sum's terms, and each partial sum, is rounded once.
        bound = 2 * size * 2.0**-11 * size * largest
        assert float((summed.double() - expected).abs().max()) <= max(bound, 2.0**-149)
        assert given_bytes == 100


def test_power_sgd_comes_near_the_best_approximation_and_starts_from_where_it_was() -> None:
    """Power iteration on an unchanging matrix: its error falls to that of the cut-off SVD."""
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(5))
    matrix = matrix @ torch.diag(0.8 ** torch.arange(30.0))
    best = float(torch.linalg.svdvals(matrix)[3:].square().sum().sqrt())

    def part(ranks: ThreadCommunicator) -> list[float]:
        compressed = PowerSgdSum(ranks, rank=3)
        errors = []
        for _ in range(12):
            gradients = gradients_of({"matrix": matrix})
            compressed.load({**compressed.state(), RESIDUAL: {}})  # the factors alone go on
            compressed.sum_(gradients)
            errors.append(float((gradients.views["matrix"] - matrix).norm()))
        return errors

    errors = on_threads(1, part)[0]
    assert errors[-1] < 1.02 * best < errors[0]
