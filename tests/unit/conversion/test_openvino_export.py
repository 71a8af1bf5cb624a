from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from tasks.contracts.data import ValidatedDataset
from tasks.conversion.config import ConversionConfig
from tasks.conversion.onnx_export import MODEL_FILE, build_onnx
from tasks.conversion.openvino_export import build_openvino, read_ir, save_ir
from tasks.conversion.parity import score_gap
from tasks.conversion.quantization import build_int8
from tasks.conversion.rows import ModelInputs
from tasks.conversion.variants import stamp
from tasks.errors import StorageError
from tasks.settings import PROJECT_ROOT, ArtifactStore
from tests.builders import dataset, splits
from tests.unit.conversion.conftest import Case
from tests.unit.conversion.programs import Elementwise, exported, registered


@pytest.fixture
def rows(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1024])
def test_any_number_of_rows_scores_as_pytorch_does(
    case: Case, edges: ModelInputs, num_rows: int
) -> None:
    batch = edges.block(0, num_rows)
    expected = case.load_source()(batch.categorical, batch.numeric)
    got = case.load(case.openvino)(batch.categorical, batch.numeric)
    assert score_gap(expected, got).largest < 1e-5


@pytest.mark.parametrize("name", ["openvino-fp32", "openvino-int8"])
def test_the_files_say_where_they_come_from(case: Case, name: str) -> None:
    built = next(one for one in case.built if one.name == name)
    assert built.files is not None
    model = read_ir(case.store.path(built.files))
    expected = stamp(built.name, case.program)  # type: ignore[arg-type]
    assert {key: model.get_rt_info(["falaj", key]).astype(str) for key in expected} == expected
    assert expected["precision"] == built.precision


def test_two_conversions_give_the_same_bytes(case: Case, store: ArtifactStore) -> None:
    rows = dataset(store)
    program = registered(store, rows, case.store.path(case.program.program).read_bytes())
    onnx = build_onnx(program, case.config, store)
    again = build_openvino(program, onnx, case.config, store)
    int8 = build_int8(program, again, rows, splits(), case.config, store)
    for old, new in ((case.openvino, again), (case.int8, int8)):
        assert old.files is not None
        assert new.files is not None
        assert new.files.sha256 == old.files.sha256


def test_an_operator_that_openvino_lacks_leaves_the_onnx_form_standing(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig
) -> None:
    network = Elementwise(lambda numbers: torch.linalg.det(numbers[:, :4].reshape(-1, 2, 2)))
    program = registered(store, rows, exported(network))
    onnx = build_onnx(program, quick, store)
    openvino = build_openvino(program, onnx, quick, store)
    int8 = build_int8(program, openvino, rows, splits(), quick, store)
    assert onnx.failure is None
    assert openvino.failure is not None
    assert "OpenVINO cannot convert the ONNX form" in openvino.failure
    assert "Det-20" in openvino.failure
    assert int8.failure == f"it is made from openvino-fp32, which failed: {openvino.failure}"


def test_a_refused_write_is_a_storage_error(case: Case, store: ArtifactStore) -> None:
    assert case.openvino.files is not None
    model = read_ir(case.store.path(case.openvino.files))
    store.root.parent.mkdir(exist_ok=True)
    store.root.write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="OpenVINO could not write the model"):
        save_ir(model, store.root, {})


def test_openvino_and_nncf_report_nothing_and_leave_logging_alone(case: Case) -> None:
    program = """
        import logging, sys
        calls = []
        def watch(event, details):
            if event in {"socket.connect", "socket.getaddrinfo", "subprocess.Popen"}:
                calls.append((event, details))
        sys.addaudithook(watch)
        from pathlib import Path
        from tasks.conversion.openvino_export import convert_onnx, without_reporting
        convert_onnx(Path(sys.argv[1]))
        without_reporting("nncf")
        assert "openvino_telemetry.main" not in sys.modules
        assert not calls, calls
        assert logging.getLoggerClass() is logging.Logger
    """
    assert case.onnx.files is not None
    model = case.store.path(case.onnx.files) / MODEL_FILE
    command = [sys.executable, "-c", textwrap.dedent(program), str(model)]
    subprocess.run(command, check=True, timeout=120, cwd=PROJECT_ROOT)
