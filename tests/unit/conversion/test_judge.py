from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.contracts.conversion import VariantLatency, VariantThroughput
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant, ModelVariant
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.convert import judge_variants
from tasks.conversion.decide import EAGER, GOALS, Measurements, choose, decide
from tasks.conversion.examine import Examined, ScoreGap, quality_failure
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.measure import Timing
from tasks.conversion.targets.catalog import FORMAT
from tasks.kernel.errors import ConfigurationError
from tests.support.conversion.cases import Case, judged_rows
from tests.support.conversion.forging import passed_off
from tests.support.conversion.programs import (
    NotANumber,
    SmallNetwork,
    SwappedColumns,
    build_one,
    tabular_job,
    with_formats,
)
from tests.support.suite.promises import Promise, proves

CONFIG = ConversionConfig(batch_sizes=(1, 1024))
NO_CHANGE = Metric(value=0.0, low=0.0, high=0.0)
JUDGED = judged_rows(change=lambda *_: NO_CHANGE)


def _timing(ms: float, spread: float = 0.0) -> Timing:
    values = ms * (1 + spread * np.linspace(-1, 1, 15))
    return Timing(calls_ms=values, rounds_ms=values, cpu_rounds_ms=values)


def _examined(name: str, failure: str | None = None) -> Examined:
    form = FORMAT[name]
    built = BuiltVariant(
        name=name, format=form.file_format, precision=form.precision, files=None, settings={}
    )
    gaps = dict.fromkeys(("test", "edge", "timed"), ScoreGap(largest=1e-7, mean=1e-8, num_rows=100))
    return Examined(built, failure, gaps=gaps, change=NO_CHANGE)


def _decided(case: Case, times_ms: dict[str, tuple[float, float]]) -> dict[str, ModelVariant]:
    """Decision for given medians at batch 1 and 1024."""
    timings = {
        rows: {name: _timing(ms[position]) for name, ms in times_ms.items()}
        for position, rows in enumerate(CONFIG.batch_sizes)
    }
    examined = [_examined(name) for name in times_ms if name != EAGER]
    measured, job = Measurements(timings, {}), replace(case, config=CONFIG)
    return {v.name: v for v in decide(job, examined, measured, JUDGED)}


@pytest.mark.parametrize(
    ("times_ms", "accepted", "words", "to_eager", "to_replaced"),
    [
        # faster at one batch size at least
        (
            {"onnx-fp32": (0.05, 15.0)},
            [True],
            ["Accepted for batches of 1.", "batch 1: 4.00 x PyTorch eager", "batch 1024: 0.67 x"],
            [0.25, 1.5],
            [None, None],
        ),
        # slower than the simpler one, and as fast
        (
            {"onnx-fp32": (0.05, 5.0), "openvino-fp32": (0.1, 5.0)},
            [True, False],
            ["Dropped: at no batch size 1.05 times", "batch 1: 0.50 x onnx-fp32", "1024: 1.00 x"],
            [0.5, 0.5],
            [2.0, 1.0],
        ),
        # the fastest simpler one is another one at each batch size
        (
            {"onnx-fp32": (0.05, 12.0), "openvino-fp32": (0.1, 5.0)},
            [True, True],
            ["batch 1: 0.50 x onnx-fp32", "batch 1024: 2.00 x PyTorch eager"],
            [0.5, 0.5],
            [2.0, None],
        ),
        # what was dropped is nobody's baseline
        (
            {"onnx-fp32": (0.1, 5.0), "openvino-fp32": (0.099, 4.9), "openvino-int8": (0.08, 4.0)},
            [True, False, True],
            ["batch 1: 1.25 x onnx-fp32"],
            [0.4, 0.4],
            [0.8, 0.8],
        ),
    ],
)
def test_a_variant_has_to_be_faster_than_the_fastest_simpler_one(
    case: Case,
    times_ms: dict[str, tuple[float, float]],
    accepted: list[bool],
    words: list[str],
    to_eager: list[float],
    to_replaced: list[float | None],
) -> None:
    decided = _decided(case, {EAGER: (0.2, 10.0), **times_ms})
    assert [variant.accepted for variant in decided.values()] == accepted
    last = decided[list(times_ms)[-1]]
    assert all(word in last.reason for word in words)
    assert [at.ratio_to_eager for at in last.latencies] == pytest.approx(to_eager)
    assert [at.ratio_to_replaced for at in last.latencies] == [
        ratio if ratio is None else pytest.approx(ratio) for ratio in to_replaced
    ]


def test_a_gain_that_is_not_certain_does_not_count(case: Case) -> None:
    timings = {
        rows: {EAGER: _timing(1.0), "onnx-fp32": _timing(0.85, spread=0.3)}
        for rows in CONFIG.batch_sizes
    }
    job, examined = replace(case, config=CONFIG), [_examined("onnx-fp32")]
    (variant,) = decide(job, examined, Measurements(timings, {}), JUDGED)
    assert not variant.accepted
    assert "1.18 x PyTorch eager (1.0" in variant.reason


@pytest.mark.parametrize(("low", "fails"), [(-0.0009, False), (-0.001, False), (-0.0011, True)])
def test_auc_is_judged_by_the_lower_end_of_its_interval(low: float, fails: bool) -> None:
    bound = QualityBound(max_gap=0.1, mean_gap=0.1, quality_drop=0.001)
    failure = quality_failure(Metric(value=-0.0005, low=low, high=0.0), bound, "AUC")
    assert (failure is not None) == fails
    if failure:
        assert "AUC changes by -0.00050 [-0.00110, +0.00000]" in failure


def test_all_targets_are_judged_on_real_measurements(case: Case) -> None:
    backwards = case.built[::-1]
    torch.set_num_threads(2)
    variants = judge_variants(case, backwards)
    assert torch.get_num_threads() == 2  # judging puts it back
    assert [v.name for v in variants] == ["onnx-fp32", "openvino-fp32", "openvino-int8"]
    for variant, built in zip(variants, case.built, strict=True):
        assert (variant.files, variant.provenance) == (built.files, built.provenance)
        assert variant.parity_max <= TABULAR.bounds[variant.precision].max_gap
        assert variant.auc_change is not None
        assert [at.batch_rows for at in variant.latencies] == [1, 8]
        assert variant.reason.startswith("Accepted" if variant.accepted else "Dropped")
        assert variant.settings["threads"] == "1"
        assert variant.throughput.rows_per_s.value > 0
        assert [standing.goal for standing in variant.standings] == ["one-row", "bulk", "price"]


@proves(Promise.CONVERSION, "the wrong form is dropped with its reason")
@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (SwappedColumns(), "an answer differs by"),
        (NotANumber(), "the converted model gives NaN or Inf for"),
    ],
)
def test_a_form_of_another_model_is_caught_and_the_others_survive(
    case: Case, network: SmallNetwork, sentence: str
) -> None:
    forged = build_one("onnx-fp32", tabular_job(case.store, network))
    built = (passed_off(case.store, forged, case.onnx), case.openvino, case.int8)
    variants = judge_variants(case, built)
    assert not variants[0].accepted
    assert sentence in variants[0].reason
    assert variants[0].latencies == ()
    assert variants[1].parity_max is not None
    assert [at.batch_rows for at in variants[1].latencies] == [1, 8]


def test_a_format_that_nobody_built_is_an_error(case: Case) -> None:
    with pytest.raises(ConfigurationError, match="openvino-fp32, openvino-int8"):
        judge_variants(case, (case.onnx,))


def test_a_form_for_other_hardware_is_neither_timed_nor_kept(case: Case) -> None:
    fp16 = build_one("onnx-fp16", case, case.onnx)
    (variant,) = judge_variants(with_formats(case, "onnx-fp16"), (fp16,))
    assert not variant.accepted
    assert variant.latencies == ()
    assert variant.reason.startswith("Dropped: it is for gpu, and this is cpu")


def _variant(
    name: str,
    times: dict[int, tuple[float, float]],
    *,
    rows_per_s: float | None = None,
    cpu_s: float = 1.0,
    accepted: bool = True,
    hardware_class: str = "cpu",
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
    return ModelVariant.model_construct(
        name=name,
        hardware_class=hardware_class,
        latencies=tuple(
            VariantLatency(batch_rows=rows, p50_ms=ms, p95_ms=2 * ms, ratio_to_eager=ratio)
            for rows, (ms, ratio) in times.items()
        ),
        throughput=measured,
        accepted=accepted,
    )


def test_each_goal_takes_what_is_best_for_it() -> None:
    variants = (
        _variant("quick", {32: (1.0, 0.5)}, rows_per_s=1000, cpu_s=9),
        _variant("cheap", {32: (4.0, 0.5)}, rows_per_s=3000, cpu_s=3),
        _variant("many", {32: (2.0, 0.5)}, rows_per_s=5000, cpu_s=5),
        _variant("dropped", {32: (0.1, 0.1)}, rows_per_s=9000, cpu_s=1, accepted=False),
    )
    chosen = choose(variants, ConversionConfig())
    assert [variant.serves for variant in chosen] == [("one-row",), ("price",), ("bulk",), ()]
    assert chosen[2].standings[0].reason == "quick 1 ms, cheap 4 ms, many 2 ms"
    assert [standing.reason for standing in chosen[3].standings] == ["it was dropped"] * 3


@pytest.mark.parametrize(
    ("goal", "variant", "reason"),
    [
        ("one-row", {"times": {8: (0.1, 1.5), 9: (15, 0.3)}}, "PyTorch eager is faster at batch 8"),
        ("bulk", {"times": {1: (0.1, 0.5)}}, "it was not measured"),
    ],
)
def test_what_is_no_better_or_not_measured_is_not_chosen(
    goal: str, variant: dict[str, Any], reason: str
) -> None:
    (found,) = choose((_variant("a", **variant),), ConversionConfig())
    standing = found.standings[list(GOALS).index(goal)]
    assert not standing.chosen
    assert standing.reason.startswith(reason)


@pytest.mark.parametrize(("simple_ms", "chosen"), [(0.104, "a"), (0.106, "b")])
def test_a_little_better_is_not_worth_a_more_complex_variant(simple_ms: float, chosen: str) -> None:
    variants = _variant("a", {1: (simple_ms, 0.5)}), _variant("b", {1: (0.1, 0.5)})
    found = choose(variants, ConversionConfig())
    assert [variant.name for variant in found if variant.standings[0].chosen] == [chosen]


@pytest.mark.parametrize(("hardware", "seconds"), [("cpu", 20), ("gpu", 10)])
def test_price_is_that_of_processor_seconds_and_of_a_gpu_that_of_its_time(
    hardware: str, seconds: float
) -> None:
    one = _variant("a", {1: (1, 0.5)}, rows_per_s=1e5, cpu_s=20, hardware_class=hardware)
    (found,) = choose((one,), ConversionConfig(price_per_core_hour=3.6))
    assert found.price.per_million == pytest.approx(seconds * 3.6 / 3600)
    assert found.standings[list(GOALS).index("price")].figure == found.price.per_million
