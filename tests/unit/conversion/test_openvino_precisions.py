"""The OpenVINO forms that compute in bfloat16, or keep their weights in 8 bits."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.contracts.release import BuiltVariant
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.processor import this_processor
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.openvino import read_ir
from tasks.conversion.targets.registry import load_files
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import build_one


def _built(case: Case, name: str) -> BuiltVariant:
    given = case.onnx, case.openvino
    one = build_one(name, case.program, case.rows, case.config, case.store, *given)
    assert one.failure is None
    return one


needs_bf16 = pytest.mark.skipif(
    not this_processor().computes_bf16, reason="this processor computes no bfloat16"
)


@needs_bf16
def test_bfloat16_is_what_the_loaded_model_says_it_runs_in(
    case: Case, typical: ModelInputs
) -> None:
    model = case.load(_built(case, "openvino-bf16"))
    assert model.settings["precision"] == "bf16"
    gap = np.abs(model(typical) - case.load_source()(typical)).max()
    assert 1e-5 < gap < TABULAR.bounds["bf16"].max_gap


def test_weights_in_8_bits_stay_within_their_bound_and_halve_the_file(
    case: Case, typical: ModelInputs
) -> None:
    one = _built(case, "openvino-weights-int8")
    model = case.load(one)
    assert model.settings["precision"] == "f32"
    gap = np.abs(model(typical) - case.load_source()(typical)).max()
    assert 0 < gap < TABULAR.bounds["weights-int8"].max_gap
    assert one.files is not None
    assert case.openvino.files is not None
    sizes = [
        (case.store.path(files) / "model.bin").stat().st_size
        for files in (one.files, case.openvino.files)
    ]
    assert sizes[0] < sizes[1] / 2


@pytest.mark.parametrize(
    "name", [pytest.param("openvino-bf16", marks=needs_bf16), "openvino-weights-int8"]
)
def test_the_files_say_their_precision(case: Case, name: str) -> None:
    one = _built(case, name)
    assert one.files is not None
    model = read_ir(case.store.path(one.files))
    assert model.get_rt_info(["falaj", "precision"]).astype(str) == FORMAT[name].precision


def test_a_target_loads_with_the_threads_it_is_told(case: Case) -> None:
    one = _built(case, "openvino-weights-int8")
    assert one.files is not None
    folder = case.store.path(one.files)
    model = load_files(one.name, folder, case.program.signature, Runtime(threads=2))
    assert model.settings["threads"] == "2"
