"""Which variant serves a goal: by a stated rule, from recorded figures alone."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.contracts.evaluation import Metric
from tasks.contracts.measurement import GoalStanding, VariantLatency, VariantThroughput
from tasks.contracts.release import ModelVariant
from tasks.conversion.config import GOALS, ConversionConfig, Goal
from tasks.conversion.gates.choice import choose, latency_at


def _variant(
    name: str,
    times: dict[int, tuple[float, float]],
    *,
    rows_per_s: float | None = None,
    cpu_s: float = 1.0,
    accepted: bool = True,
    hardware_class: str = "cpu",
    change: float = 0.0,
) -> ModelVariant:
    """Milliseconds and ratio to PyTorch eager by batch size."""
    measured = None
    if rows_per_s is not None:
        measured = VariantThroughput(
            batch_rows=32,
            streams=2,
            rows_per_s=Metric(value=rows_per_s, low=rows_per_s, high=rows_per_s),
            cpu_s_per_million=cpu_s,
        )
    return ModelVariant(
        name=name,
        format="onnx",
        precision="fp32",
        hardware_class=hardware_class,
        files=None,
        source_sha256="0" * 64,
        parity_max=0.0,
        parity_mean=0.0,
        auc_change=Metric(value=change, low=change, high=change),
        latencies=tuple(
            VariantLatency(batch_rows=rows, p50_ms=ms, p95_ms=2 * ms, ratio_to_eager=ratio)
            for rows, (ms, ratio) in times.items()
        ),
        throughput=measured,
        num_bytes=0,
        load_ms=1.0,
        accepted=accepted,
        reason="",
        settings={},
    )


def _standing(goal: Goal, *variants: ModelVariant) -> dict[str, GoalStanding]:
    config = ConversionConfig(goals={"goal": goal})
    return {v.name: v.standings[0] for v in choose(variants, config)}


def _chosen(goal: Goal, *variants: ModelVariant) -> list[str]:
    return [name for name, one in _standing(goal, *variants).items() if one.chosen]


@pytest.mark.parametrize(
    ("batch_rows", "best"), [(1, "small"), (31, "small"), (32, "large"), (5000, "large")]
)
def test_the_fastest_variant_depends_on_the_batch(batch_rows: int, best: str) -> None:
    variants = (
        _variant("small", {1: (0.05, 0.3), 32: (0.5, 0.9)}),
        _variant("large", {1: (0.1, 0.6), 32: (0.2, 0.4)}),
        _variant("dropped", {1: (0.01, 0.1), 32: (0.01, 0.1)}, accepted=False),
    )
    assert _chosen(Goal(best="latency", batch_rows=batch_rows), *variants) == [best]


def test_below_the_smallest_measured_batch_the_smallest_counts() -> None:
    at = latency_at(_variant("a", {8: (0.2, 0.5), 64: (1.0, 0.5)}), 1)
    assert at is not None
    assert at.batch_rows == 8
    assert latency_at(_variant("b", {}), 1) is None


def test_nothing_is_chosen_where_pytorch_is_faster() -> None:
    variant = _variant("a", {1: (0.1, 0.5), 1024: (15.0, 1.3)})
    standing = _standing(Goal(best="latency", batch_rows=2000), variant)["a"]
    assert not standing.chosen
    assert standing.reason == "PyTorch eager is faster at batch 1024"
    assert choose((), ConversionConfig()) == ()


def test_a_little_better_is_not_worth_a_more_complex_variant() -> None:
    simple, complex_one = _variant("a", {1: (0.104, 0.5)}), _variant("b", {1: (0.1, 0.5)})
    assert _chosen(Goal(best="latency"), simple, complex_one) == ["a"]
    slower = _variant("a", {1: (0.106, 0.5)})
    assert _chosen(Goal(best="latency"), slower, complex_one) == ["b"]


def test_a_bound_on_slow_calls_rules_a_variant_out_for_every_kind_of_goal() -> None:
    quick = _variant("quick", {32: (1.0, 0.5)}, rows_per_s=1000, cpu_s=9)
    cheap = _variant("cheap", {32: (4.0, 0.5)}, rows_per_s=5000, cpu_s=3)
    assert _chosen(Goal(best="throughput"), quick, cheap) == ["cheap"]
    assert _chosen(Goal(best="cost"), quick, cheap) == ["cheap"]
    for kind in ("throughput", "cost"):
        bounded = Goal.model_validate({"best": kind, "batch_rows": 32, "p95_ms": 5})
        assert _chosen(bounded, quick, cheap) == ["quick"]
        standing = _standing(bounded, quick, cheap)["cheap"].reason
        assert standing == "95 % of calls of 32 rows take up to 8 ms, allowed are 5 ms"


def test_a_goal_may_allow_less_loss_than_the_gate() -> None:
    fast = _variant("int8", {1: (0.05, 0.2)}, change=-0.0008)
    exact = _variant("fp32", {1: (0.1, 0.4)})
    assert _chosen(Goal(best="latency"), exact, fast) == ["int8"]
    strict = Goal(best="latency", quality_drop=0.0005)
    assert _chosen(strict, exact, fast) == ["fp32"]
    assert "AUC may change by -0.00080" in _standing(strict, exact, fast)["int8"].reason


def test_price_is_that_of_processor_seconds_and_of_a_gpu_that_of_its_time() -> None:
    config = ConversionConfig(price_per_core_hour=3.6)
    on_cpu, on_gpu = (
        choose((_variant("a", {1: (1, 0.5)}, rows_per_s=1e5, cpu_s=20, hardware_class=h),), config)[
            0
        ]
        for h in ("cpu", "gpu")
    )
    assert on_cpu.price is not None
    assert on_cpu.price.per_million == pytest.approx(20 * 3.6 / 3600)
    assert on_gpu.price is not None
    assert on_gpu.price.per_million == pytest.approx(10 * 3.6 / 3600)
    cost = on_cpu.standings[list(GOALS).index("price")]
    assert cost.figure == on_cpu.price.per_million
    assert cost.unit == "USD per million rows"


def test_every_variant_says_why_it_was_not_chosen() -> None:
    variants = choose(
        (
            _variant("a", {1: (0.1, 0.5)}, rows_per_s=1000),
            _variant("b", {1: (0.2, 0.6)}, rows_per_s=900),
            _variant("c", {}, accepted=False),
        ),
        ConversionConfig(),
    )
    assert variants[0].serves == ("one-row", "bulk", "price")
    first = variants[0].standings[0]
    assert first.rule.startswith("Least median latency of calls of 1 rows; the simplest")
    assert first.reason == "0.1 ms; b 0.2. The simplest within 1.05 times of the best"
    assert variants[1].standings[0].reason == "0.2 ms, a 0.1 ms"
    assert variants[1].standings[1].reason == "900 rows/s, a 1,000 rows/s"
    assert [standing.reason for standing in variants[2].standings] == ["it was dropped"] * 3


def test_what_was_not_measured_is_not_chosen() -> None:
    standing = _standing(Goal(best="throughput"), _variant("a", {1: (0.1, 0.5)}))["a"]
    assert not standing.chosen
    assert standing.figure is None
    assert standing.reason == "it was not measured"


@pytest.mark.parametrize(
    "goal",
    [{"best": "beauty"}, {"best": "cost", "p95_ms": 0}, {"best": "cost", "quality_drop": -1}],
)
def test_a_goal_that_cannot_be_is_refused(goal: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ConversionConfig.model_validate({"goals": {"goal": goal}})
