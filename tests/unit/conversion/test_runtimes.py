from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.contracts.conversion import tabular_signature
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.tabular_rows import tabular_inputs
from tasks.conversion.targets.interface import LoadedModel, Runtime, loaded
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tasks.conversion.targets.registry import load_files
from tasks.kernel.errors import ConversionError, DataContractError
from tests.support.conversion.cases import Case
from tests.support.data.builders import COLUMNS


@pytest.fixture(params=["pytorch", "onnx", "openvino"])
def model(request: pytest.FixtureRequest, case: Case) -> LoadedModel:
    if request.param == "pytorch":
        return case.load_source()
    return case.load(case.onnx if request.param == "onnx" else case.openvino)


def test_each_runtime_says_what_it_really_runs_with(case: Case) -> None:
    pytorch, onnx, openvino = case.load_source(), case.load(case.onnx), case.load(case.openvino)
    assert pytorch.settings["threads"] == "1"
    assert onnx.settings["threads"] == "1"
    assert onnx.settings["spinning"] == "0"
    assert onnx.settings["provider"] == "CPUExecutionProvider"
    assert openvino.settings["precision"] == "f32"
    assert openvino.settings["threads"] == "1"
    assert openvino.settings["device"] == "CPU"
    assert all(m.load_ms > 0 for m in (pytorch, onnx, openvino))


def test_two_threads_are_read_back_as_two(case: Case) -> None:
    assert case.openvino.files is not None
    folder = case.store.path(case.openvino.files)
    model = load_files("openvino-fp32", folder, case.program.signature, Runtime(threads=2))
    assert model.settings["threads"] == "2"


def test_a_setting_that_did_not_take_is_an_error() -> None:
    settings = {"runtime": "openvino 2026", "precision": "bf16"}
    signature = tabular_signature(COLUMNS)
    with pytest.raises(ConversionError, match="runs with precision 'bf16', expected 'f32'"):
        loaded(0.0, lambda _: np.zeros(1, np.float32), signature, settings, {"precision": "f32"})


def test_other_layouts_and_number_types_give_the_same_scores(
    model: LoadedModel, typical: ModelInputs
) -> None:
    expected = model(typical)
    assert expected.dtype == np.float32
    assert expected.shape == (typical.num_rows,)
    codes, numbers = typical["categorical"], typical["numeric"]
    layouts = [
        (codes.astype(np.int64), numbers.astype(np.float64)),
        (np.asfortranarray(codes), np.asfortranarray(numbers)),
        (np.repeat(codes, 2, axis=0)[::2], np.repeat(numbers, 2, 0)[::2]),
    ]
    for categorical, numeric in layouts:
        np.testing.assert_array_equal(model(tabular_inputs(categorical, numeric)), expected)


def test_read_only_arrays_are_taken(model: LoadedModel, typical: ModelInputs) -> None:
    batch = typical.block(0, 3)
    for values in batch.values():
        values.setflags(write=False)
    assert model(batch).shape == (3,)


def test_a_later_call_does_not_change_an_earlier_result(
    model: LoadedModel, typical: ModelInputs
) -> None:
    first = model(typical.block(0, 8))
    before = first.copy()
    model(typical.block(8, 16))
    np.testing.assert_array_equal(first, before)


def test_no_rows_give_no_scores(model: LoadedModel) -> None:
    assert model(tabular_inputs(np.empty((0, 3), np.int32), np.empty((0, 5)))).shape == (0,)


@pytest.mark.parametrize(
    ("codes", "numbers"), [((4, 5), (4, 3)), ((4, 3), (3, 5)), ((4, 3), (4, 6)), ((4,), (4, 5))]
)
def test_arrays_of_another_shape_are_refused_with_a_sentence(
    model: LoadedModel, codes: tuple[int, ...], numbers: tuple[int, ...]
) -> None:
    with pytest.raises(DataContractError, match=r"expected .* were they swapped\?"):
        model({"categorical": np.zeros(codes, np.int32), "numeric": np.zeros(numbers)})


def test_an_array_that_is_absent_is_refused(model: LoadedModel, typical: ModelInputs) -> None:
    with pytest.raises(DataContractError, match=r"expected \{'categorical': .*, 'numeric': "):
        model({"numeric": typical["numeric"]})


def test_a_provider_that_is_not_there_is_an_error_and_no_silent_fall_back(case: Case) -> None:
    assert case.onnx.files is not None
    folder, gpu = case.store.path(case.onnx.files), Runtime(hardware_class="gpu")
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(ConversionError, match="provider 'CPUExecutionProvider', expected 'CUDA"),
    ):
        load_files("onnx-fp32", folder, case.program.signature, gpu)


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("onnx-fp32", "model.onnx", "ONNX Runtime cannot load the model"),
        ("openvino-fp32", "model.xml", "OpenVINO cannot load the model"),
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_files_that_are_no_model_are_refused_with_a_sentence(
    tmp_path: Path, name: str, file: str, message: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        load_files(name, tmp_path, tabular_signature(COLUMNS), Runtime())


def test_the_thread_count_of_pytorch_is_put_back(case: Case) -> None:
    before = torch.get_num_threads()
    with torch_threads_restored():
        path = case.store.path(case.program.program)
        load_pytorch(path, case.program.signature, Runtime(threads=before + 1))
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
