"""What is measured beside latency: steadiness, throughput, memory, operators; no time is judged."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from tasks.conversion.config import QualityBound
from tasks.conversion.gates.batch_invariance import CALL_SIZES, rearrange, steadiness_failure
from tasks.conversion.gates.footprint import _answers, measure_footprints
from tasks.conversion.gates.profiles import top_operators
from tasks.conversion.gates.throughput import ROUNDS, measure_throughput, usable_cores
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.tabular import WORDING, score_distances
from tasks.conversion.loading import load_variant
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.runtimes import load_pytorch, torch_threads_restored
from tests.support.conversion.cases import Case

BOUND = QualityBound(max_gap=0.04, mean_gap=0.004, quality_drop=0.1)
TOLD = WORDING["classification"]
BATCHES = tuple(ModelInputs({"x": np.arange(s, s + 100.0)}) for s in range(0, 2000, 100))


def _failure(model: object) -> str | None:
    scores = np.concatenate([model(batch) for batch in BATCHES])  # type: ignore[operator]
    return steadiness_failure(
        model,  # type: ignore[arg-type]
        BATCHES,
        scores,
        score_distances,
        BOUND,
        TOLD,
        seed=0,
    )


def test_rows_are_taken_from_all_over_and_each_place_is_known() -> None:
    other = rearrange(BATCHES, seed=0)
    taken = np.concatenate([call["x"] for call in other.calls])
    np.testing.assert_array_equal(taken, other.places)
    assert len(set(other.places.tolist())) == len(other.places) == 8 * 64
    assert other.places.min() < 100
    assert other.places.max() >= 1900
    assert [call.num_rows for call in other.calls[: len(CALL_SIZES)]] == list(CALL_SIZES)
    assert np.any(np.diff(other.places[:64]) < 0)


def test_an_answer_for_the_row_alone_is_steady() -> None:
    assert _failure(lambda batch: (np.sin(batch["x"]) / 2).astype(np.float32)) is None


def test_an_answer_that_looks_at_the_call_is_not() -> None:
    def ranked(batch: ModelInputs) -> np.ndarray:
        return (0.0001 * len(batch["x"]) + np.sin(batch["x"]) / 2).astype(np.float32)

    told = _failure(ranked)
    assert told is not None
    assert told.startswith("a probability depends on the other rows of its call: in calls of 1 to")


def test_an_answer_that_changes_each_time_is_not() -> None:
    count = itertools.count()
    told = _failure(lambda batch: (np.sin(batch["x"]) / 2 + 1e-5 * next(count)).astype(np.float32))
    assert told is not None
    assert "when the same rows are asked for again" in told


def test_all_callers_ask_at_the_same_time_each_a_copy_of_its_own() -> None:
    opened: list[int] = []
    asking = threading.Barrier(3, timeout=60)

    def open_stream() -> object:
        opened.append(len(opened))
        first = iter([True])

        def answer(batch: ModelInputs) -> np.ndarray:
            if next(first, False):
                asking.wait()  # passes once all three callers are in a call
            return np.zeros(batch.num_rows, np.float32)

        return answer

    batch = ModelInputs({"x": np.zeros(4)})
    told = measure_throughput(open_stream, batch, 3, 0.2)  # type: ignore[arg-type]
    assert opened == [0, 1, 2]
    assert (told.streams, told.batch_rows) == (3, 4)
    assert 0 < told.rows_per_s.low <= told.rows_per_s.value <= told.rows_per_s.high
    assert ROUNDS >= 6  # fewer have no interval of 95 %


@pytest.mark.parametrize(
    ("content", "most"),
    [("150000 100000", 2), ("max 100000", None), ("50000 100000", 1), ("", None)],
)
def test_cores_are_no_more_than_the_control_group_allows(
    tmp_path: Path, content: str, most: int | None
) -> None:
    free = usable_cores(tmp_path / "absent")
    (tmp_path / "cpu.max").write_text(content)
    expected = free if most is None else min(free, most)
    assert usable_cores(tmp_path / "cpu.max") == expected


def test_memory_is_measured_in_a_process_of_its_own(case: Case, typical: ModelInputs) -> None:
    found = measure_footprints(case.built, case.program, typical.block(0, 32), 1, "cpu", case.store)
    assert set(found) == {"onnx-fp32", "openvino-fp32", "openvino-int8"}
    assert all(0 <= one.memory_bytes < 2**30 and one.load_ms > 0 for one in found.values())


def test_a_variant_that_does_not_load_there_leaves_the_others_measured(
    case: Case, typical: ModelInputs, caplog: pytest.LogCaptureFixture
) -> None:
    bad = case.openvino.model_copy(update={"stamp": {}})
    found = measure_footprints(
        (case.onnx, bad), case.program, typical.block(0, 8), 1, "cpu", case.store
    )
    assert set(found) == {"onnx-fp32"}
    assert "memory of 1 of 2 variants was not measured" in caplog.text
    assert "recorded without a stamp" in caplog.text


def test_words_of_a_library_on_standard_output_are_passed_over() -> None:
    lines = ["hello", '["a", {"memory_bytes": 5, "load_ms": 1.5}]', "[1, 2]", '"x"']
    assert [name for name, _ in _answers(lines)] == ["a"]


@pytest.mark.parametrize("name", ["onnx-fp32", "openvino-fp32", "openvino-int8"])
def test_each_runtime_tells_its_operators(case: Case, typical: ModelInputs, name: str) -> None:
    one = next(variant for variant in case.built if variant.name == name)
    plain = load_variant(one, case.program, Runtime(), case.store)
    assert plain.profiler is None
    model = load_variant(one, case.program, Runtime(profiled=True), case.store)
    assert model.profiler is not None
    told = top_operators(model.profiler, typical.block(0, 64))
    assert told.batch_rows == 64
    assert 0 < len(told.operators) <= 6
    assert all(0 <= part.share <= 1 and part.calls >= 1 for part in told.operators)
    assert sum(part.ms for part in told.operators) <= told.total_ms * 1.0001
    np.testing.assert_allclose(model(typical), plain(typical), atol=1e-6)


def test_profiling_pytorch_tells_its_operators_and_writes_nothing(
    case: Case, typical: ModelInputs, capfd: pytest.CaptureFixture[str]
) -> None:
    path, runtime = case.store.path(case.program.program), Runtime(profiled=True)
    with torch_threads_restored():
        model = load_pytorch(path, case.program.signature, runtime)
        assert model.profiler is not None
        told = top_operators(model.profiler, typical.block(0, 64))
    assert "addmm" in {part.operator for part in told.operators}
    assert capfd.readouterr() == ("", "")
