from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tasks.training.strategies.base import Exchange, State
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.flat_gradients import GradientSum
from tasks.training.strategies.gradient_compression import RESIDUAL, ErrorFeedback, HalfPrecisionSum
from tasks.training.strategies.power_sgd import LowRank, PowerSgdSum
from tasks.training.strategies.top_k import TopKSum
from tests.support.suite.examples import examples
from tests.support.training.thread_ranks import ThreadExchange, gradients_of, on_threads

SHAPES = {"matrix": (12, 9), "bias": (12,), "cube": (4, 3, 5), "scalar": ()}
NUM_VALUES = sum(math.prod(shape) for shape in SHAPES.values())
Build = Callable[[StrategyConfig, Exchange], GradientSum]
LOSSY = {
    "powersgd": (PowerSgdSum, StrategyConfig(gradient_compression="powersgd", powersgd_rank=2)),
    "topk": (TopKSum, StrategyConfig(gradient_compression="topk", topk_share=0.1)),
}


def gradient(rank: int, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(97 * rank + step)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat_of(tensors: dict[str, Tensor]) -> Tensor:
    return gradients_of(tensors).flat


def left_out(state: State) -> Tensor:
    residual = state[RESIDUAL]
    return flat_of({name: residual[name] for name in SHAPES} if residual else gradient(0, 0, 0.0))


@pytest.mark.parametrize("way", LOSSY)
@examples(15)
@given(
    size=st.integers(1, 4), num_steps=st.integers(1, 5), scale=st.sampled_from([1e-12, 1.0, 1e12])
)
def test_nothing_is_lost_all_that_went_in_came_out_or_is_left_over(
    way: str, size: int, num_steps: int, scale: float
) -> None:
    build, config = LOSSY[way]

    def part(exchange: ThreadExchange) -> tuple[Tensor, Tensor]:
        compressed = build(config, exchange)
        came_out = torch.zeros(NUM_VALUES, dtype=torch.float64)
        for step in range(num_steps):
            gradients = gradients_of(gradient(exchange.rank, step, scale))
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


@pytest.mark.parametrize("way", LOSSY)
def test_what_was_left_out_survives_another_number_of_ranks(way: str) -> None:
    build, config = LOSSY[way]

    def before(exchange: ThreadExchange) -> State:
        compressed = build(config, exchange)
        compressed.sum_(gradients_of(gradient(exchange.rank, 0)))
        return compressed.state()

    state = on_threads(3, before)[0]

    def after(exchange: ThreadExchange) -> Tensor:
        compressed = build(config, exchange)
        compressed.load(state)
        at_once = left_out(compressed.state())
        torch.testing.assert_close(at_once, left_out(state))
        gradients = gradients_of(gradient(0, 0, 0.0))
        compressed.sum_(gradients)
        return gradients.flat + left_out(compressed.state())

    for size in (1, 2, 4):
        for of_rank in on_threads(size, after):
            torch.testing.assert_close(of_rank, left_out(state), rtol=1e-4, atol=1e-5)


def test_power_sgd_goes_on_on_other_ranks_as_if_nothing_had_happened() -> None:
    """It is linear in the gradients, so it does not matter which rank owes what."""
    build, config = LOSSY["powersgd"]
    later = [gradient(0, step) for step in (1, 2)]

    def unbroken(exchange: ThreadExchange) -> tuple[State, list[Tensor]]:
        compressed = build(config, exchange)
        compressed.sum_(gradients_of(gradient(exchange.rank, 0)))
        state = compressed.state()
        return state, go_on(compressed, exchange)

    def go_on(compressed: GradientSum, exchange: ThreadExchange) -> list[Tensor]:
        outputs = []
        for tensors in later:
            shares = {name: value / exchange.size for name, value in tensors.items()}
            gradients = gradients_of(shares)
            compressed.sum_(gradients)
            outputs.append(gradients.flat.clone())
        return outputs

    state, expected = on_threads(2, unbroken)[0]

    def resumed(exchange: ThreadExchange) -> list[Tensor]:
        compressed = build(config, exchange)
        compressed.load(state)
        return go_on(compressed, exchange)

    for size in (1, 3):
        for output, wanted in zip(on_threads(size, resumed)[0], expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", [*LOSSY, "fp16"])
def test_what_is_no_number_on_one_rank_is_none_on_all_and_spoils_no_later_step(
    way: str, number: float
) -> None:
    build, config = LOSSY.get(way, (HalfPrecisionSum, StrategyConfig(gradient_compression="fp16")))

    def part(exchange: ThreadExchange) -> tuple[bool, bool]:
        compressed = build(config, exchange)
        compressed.sum_(gradients_of(gradient(exchange.rank, 0)))
        broken = gradients_of(gradient(exchange.rank, 1))
        if exchange.rank == 1:
            broken.flat[3] = number
        compressed.sum_(broken)
        sound = gradients_of(gradient(exchange.rank, 2))
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

    def part(exchange: ThreadExchange) -> tuple[Tensor, int]:
        gradients = gradients_of({"all": shares[exchange.rank]})
        HalfPrecisionSum(StrategyConfig(), exchange).sum_(gradients)
        return gradients.flat, exchange.given_bytes

    expected = torch.stack(shares).double().sum(0)
    largest = max(float(share.abs().max()) for share in shares)
    for summed, given_bytes in on_threads(size, part):
        assert summed.isfinite().all()
        # Each of the sum's terms, and each partial sum, is rounded once.
        bound = 2 * size * 2.0**-11 * size * largest
        assert float((summed.double() - expected).abs().max()) <= max(bound, 2.0**-149)
        assert given_bytes == 100


def test_half_precision_of_no_gradient_sends_next_to_nothing() -> None:
    def part(exchange: ThreadExchange) -> float:
        gradients = gradients_of({"all": torch.zeros(5)})
        HalfPrecisionSum(StrategyConfig(), exchange).sum_(gradients)
        return float(gradients.flat.abs().max())

    assert on_threads(2, part) == [0.0, 0.0]


@examples(20)
@given(rows=st.integers(2, 12), columns=st.integers(2, 12), rank=st.integers(1, 3))
def test_power_sgd_is_exact_for_matrices_of_its_rank(rows: int, columns: int, rank: int) -> None:
    form = LowRank.of(torch.Size([rows, columns]), rank)

    def part(exchange: ThreadExchange) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(exchange.rank)
        # All ranks' matrices have the same columns, so that their sum has the rank too.
        columns_of_all = torch.randn(rank, columns, generator=torch.Generator().manual_seed(99))
        matrix = torch.randn(rows, rank, generator=generator) @ columns_of_all
        gradients = gradients_of({"matrix": matrix})
        PowerSgdSum(StrategyConfig(powersgd_rank=rank), exchange).sum_(gradients)
        return gradients.views["matrix"], matrix

    results = on_threads(2, part)
    expected = results[0][1] + results[1][1]
    assert form is None or form.rank <= rank
    for summed, _ in results:
        torch.testing.assert_close(summed, expected, rtol=1e-3, atol=1e-3)


def test_power_sgd_comes_near_the_best_approximation_and_starts_from_where_it_was() -> None:
    """Power iteration on an unchanging matrix: its error falls to that of the cut-off SVD."""
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(40, 30, generator=generator)
    matrix = matrix @ torch.diag(0.8 ** torch.arange(30.0))
    values = torch.linalg.svdvals(matrix)
    best = float(values[3:].square().sum().sqrt())

    def part(exchange: ThreadExchange) -> list[float]:
        compressed = PowerSgdSum(StrategyConfig(powersgd_rank=3), exchange)
        errors = []
        for _ in range(12):
            gradients = gradients_of({"matrix": matrix})
            compressed.load({**compressed.state(), RESIDUAL: {}})  # the factors alone go on
            compressed.sum_(gradients)
            errors.append(float((gradients.views["matrix"] - matrix).norm()))
        return errors

    errors = on_threads(1, part)[0]
    assert errors[-1] < 1.02 * best < errors[0]


def test_power_sgd_recovers_from_a_gradient_that_was_zero() -> None:
    def part(exchange: ThreadExchange) -> float:
        compressed = PowerSgdSum(StrategyConfig(powersgd_rank=2), exchange)
        compressed.sum_(gradients_of({"matrix": torch.zeros(9, 7)}))
        total = torch.zeros(9, 7)
        matrix = torch.ones(9, 7)
        for _ in range(3):
            gradients = gradients_of({"matrix": matrix})
            compressed.sum_(gradients)
            total += gradients.views["matrix"]
        return float((total - 3 * exchange.size * matrix).abs().max())

    assert max(on_threads(2, part)) < 1e-3


def test_power_sgd_sends_small_tensors_whole_and_exactly() -> None:
    assert LowRank.of(torch.Size([12]), 2) is None
    assert LowRank.of(torch.Size([3, 3]), 2) is None
    assert LowRank.of(torch.Size([0, 8]), 2) is None
    assert LowRank.of(torch.Size([8, 4, 4]), 2) == LowRank(8, 16, 2)
    assert LowRank.of(torch.Size([1, 64]), 2) is None  # its factors would be larger

    def part(exchange: ThreadExchange) -> tuple[Tensor, int]:
        gradients = gradients_of({"bias": torch.arange(5.0), "matrix": torch.ones(20, 30)})
        PowerSgdSum(StrategyConfig(powersgd_rank=1), exchange).sum_(gradients)
        return gradients.views["bias"].clone(), exchange.given_bytes

    for bias, given_bytes in on_threads(2, part):
        assert torch.equal(bias, 2 * torch.arange(5.0))
        assert given_bytes == 4 * (5 + 20 + 30)


@given(
    size=st.integers(1, 4),
    num_values=st.integers(1, 60),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_top_k_sends_exactly_the_largest_values(
    size: int, num_values: int, share: float, seed: int
) -> None:
    shares = [
        torch.randn(num_values, generator=torch.Generator().manual_seed(seed + rank))
        for rank in range(size)
    ]
    count = math.ceil(share * num_values)
    expected = torch.zeros(num_values)
    for values in shares:
        kept = values.abs() >= values.abs().sort(descending=True).values[count - 1]
        expected += torch.where(kept, values, 0.0)

    def part(exchange: ThreadExchange) -> tuple[Tensor, int]:
        gradients = gradients_of({"all": shares[exchange.rank]})
        TopKSum(StrategyConfig(topk_share=share), exchange).sum_(gradients)
        return gradients.flat, exchange.given_bytes

    for summed, given_bytes in on_threads(size, part):
        torch.testing.assert_close(summed, expected)
        assert given_bytes == 8 * count


def test_positions_beyond_what_float32_can_count_arrive_as_they_are() -> None:
    num_values = (1 << 24) + 5
    values = torch.zeros(num_values)
    values[(1 << 24) + 1] = 3.0

    def part(exchange: ThreadExchange) -> int:
        gradients = gradients_of({"all": values})
        TopKSum(StrategyConfig(topk_share=1e-8), exchange).sum_(gradients)
        return int(gradients.flat.argmax())

    assert on_threads(1, part) == [(1 << 24) + 1]


def test_a_checkpoint_of_another_compression_is_taken_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def part(exchange: ThreadExchange) -> tuple[Tensor, Tensor]:
        power_sgd, config = LOSSY["powersgd"]
        first = power_sgd(config, exchange)
        first.sum_(gradients_of(gradient(0, 0)))
        top_k, config = LOSSY["topk"]
        second = top_k(config, exchange)
        second.load(first.state())
        HalfPrecisionSum(config, exchange).load(first.state())
        return left_out(first.state()), left_out(second.state())

    owed, taken_over = on_threads(1, part)[0]
    torch.testing.assert_close(owed, taken_over)
    assert "they are dropped" in caplog.text


def test_lossy_ways_are_error_feedback_and_load_a_checkpoint_without_any() -> None:
    def part(exchange: ThreadExchange) -> bool:
        for build, config in LOSSY.values():
            compressed = build(config, exchange)
            assert isinstance(compressed, ErrorFeedback)
            compressed.load({})
            compressed.sum_(gradients_of(gradient(0, 0)))
        return True

    assert on_threads(1, part) == [True]


def test_paying_back_needs_gradients_of_one_scale() -> None:
    with pytest.raises(ValidationError, match="use precision='bf16'"):
        StrategyConfig(precision="fp16", gradient_compression="topk")
