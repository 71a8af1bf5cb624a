"""Latency, throughput, memory and operators: how they are measured; no time is judged."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.conversion.gates.footprint import _answers, measure_footprints
from tasks.conversion.gates.timing import (
    LEAST_CALLS,
    WARM_UP_CALLS,
    Timing,
    measure_throughput,
    median_interval,
    time_interleaved,
    usable_cores,
)
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.loading import load_variant
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.profiles import top_operators
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tests.support.conversion.cases import Case


def _timing(*rounds_ms: float) -> Timing:
    values = np.array(rounds_ms)
    return Timing(calls_ms=values, rounds_ms=values, cpu_rounds_ms=values)


@given(st.integers(6, 200))
def test_the_interval_holds_the_median_with_95_percent_and_not_much_more(count: int) -> None:
    interval = median_interval(np.arange(1, count + 1))
    rank = round(interval.low)
    assert interval.high == count + 1 - rank
    missed = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
    narrower = missed + 2 * math.comb(count, rank) / 2**count
    assert missed <= 0.05 < narrower


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_values_are_enclosed_by_the_outermost(count: int) -> None:
    interval = median_interval(np.arange(count))
    assert (interval.low, interval.high) == (0, count - 1)


def test_a_slow_spell_of_the_machine_does_not_touch_the_ratio() -> None:
    load = np.array([1, 1, 9, 1, 4, 1, 1, 20, 1, 1])
    slow, fast = _timing(*(2.0 * load)), _timing(*(0.5 * load))
    assert fast.times_faster_than(slow).value == 4.0
    assert slow.times_faster_than(fast).high == 0.25


def test_runtimes_take_turns_and_each_is_first_as_often() -> None:
    order: list[str] = []

    def runtime(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    timings = time_interleaved({n: runtime(n) for n in "ABC"}, rounds=3, round_ms=1e-9)
    measured = "".join(order)[3 * WARM_UP_CALLS :]
    calls = LEAST_CALLS + 1  # the first of a turn is not timed
    assert measured == "".join(n * calls for n in "ABCBCACAB")
    assert all(len(t.rounds_ms) == 3 and len(t.calls_ms) == 9 for t in timings.values())


def test_short_calls_are_repeated_until_the_round_is_long_enough() -> None:
    timing = time_interleaved({"A": lambda: None}, rounds=2, round_ms=1.0)["A"]
    assert timing.calls_ms.sum() >= 2.0
    assert 0 < timing.p50_ms <= timing.p95_ms


def test_a_long_call_is_a_turn_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.conversion.gates.timing.SLOW_CALL_MS", -1.0)
    calls: list[int] = []
    timing = time_interleaved({"A": lambda: calls.append(1)}, rounds=4, round_ms=1.0)["A"]
    assert len(calls) == 1 + 4
    assert len(timing.calls_ms) == len(timing.rounds_ms) == len(timing.cpu_rounds_ms) == 4


def test_waiting_takes_time_and_no_processor() -> None:
    timing = time_interleaved({"A": lambda: time.sleep(0.01)}, rounds=2, round_ms=1.0)["A"]
    assert timing.p50_ms >= 10
    assert timing.cpu_ms < timing.p50_ms
    assert timing.cpu_ratio_to(timing) == 1


def test_all_callers_ask_at_the_same_time_each_a_copy_of_its_own() -> None:
    opened: list[int] = []
    asking = threading.Barrier(3, timeout=60)

    def open_stream() -> Callable[[ModelInputs], np.ndarray]:
        opened.append(len(opened))
        first = iter([True])

        def answer(batch: ModelInputs) -> np.ndarray:
            if next(first, False):
                asking.wait()  # passes once all three callers are in a call
            return np.zeros(batch.num_rows, np.float32)

        return answer

    measured = measure_throughput(open_stream, ModelInputs({"x": np.zeros(4)}), 3, 0.2)
    assert opened == [0, 1, 2]
    assert (measured.streams, measured.batch_rows) == (3, 4)
    assert 0 < measured.rows_per_s.low <= measured.rows_per_s.value <= measured.rows_per_s.high


@pytest.mark.parametrize(
    ("content", "most"),
    [("150000 100000", 2), ("max 100000", None), ("50000 100000", 1), ("", None)],
)
def test_cores_are_no_more_than_the_control_group_allows(
    tmp_path: Path, content: str, most: int | None
) -> None:
    free = usable_cores(tmp_path / "absent")
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path / "cpu.max") == (free if most is None else min(free, most))


def test_memory_is_measured_in_a_process_of_its_own_of_every_variant_that_loads(
    case: Case, typical: ModelInputs, caplog: pytest.LogCaptureFixture
) -> None:
    bad = case.int8.model_copy(update={"provenance": {}})
    batch, variants = typical.block(0, 32), (case.onnx, case.openvino, bad)
    found = measure_footprints(variants, case.program, batch, 1, "cpu", case.store)
    assert set(found) == {"onnx-fp32", "openvino-fp32"}
    assert all(0 <= one.memory_bytes < 2**30 and one.load_ms > 0 for one in found.values())
    assert "memory of 1 of 3 variants was not measured" in caplog.text


def test_lines_of_a_library_on_standard_output_are_passed_over() -> None:
    lines = ["hello", '["a", {"memory_bytes": 5, "load_ms": 1.5}]', "[1, 2]", '"x"']
    assert [name for name, _ in _answers(lines)] == ["a"]


@pytest.mark.parametrize("name", ["onnx-fp32", "openvino-fp32", "openvino-int8"])
def test_each_runtime_measures_its_operators(case: Case, typical: ModelInputs, name: str) -> None:
    one = next(variant for variant in case.built if variant.name == name)
    plain = load_variant(one, case.program, Runtime(), case.store)
    assert plain.profiler is None
    model = load_variant(one, case.program, Runtime(profiled=True), case.store)
    assert model.profiler is not None
    found = top_operators(model.profiler, typical.block(0, 64))
    assert found.batch_rows == 64
    assert 0 < len(found.operators) <= 6
    assert all(0 <= part.share <= 1 and part.calls >= 1 for part in found.operators)
    assert sum(part.ms for part in found.operators) <= found.total_ms * 1.0001
    np.testing.assert_allclose(model(typical), plain(typical), atol=1e-6)


def test_profiling_pytorch_finds_its_operators_and_writes_nothing(
    case: Case, typical: ModelInputs, capfd: pytest.CaptureFixture[str]
) -> None:
    path, runtime = case.store.path(case.program.program), Runtime(profiled=True)
    with torch_threads_restored():
        model = load_pytorch(path, case.program.signature, runtime)
        assert model.profiler is not None
        found = top_operators(model.profiler, typical.block(0, 64))
    assert "addmm" in {part.operator for part in found.operators}
    assert capfd.readouterr() == ("", "")
