from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from tasks.contracts.data import ValidatedDataset
from tasks.conversion.config import ConversionConfig
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.conversion.targets.openvino import read_ir, save_ir
from tasks.kernel.errors import StorageError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import Elementwise, built, exported, registered
from tests.support.data.builders import dataset


@pytest.fixture
def rows(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1024])
def test_any_number_of_rows_scores_as_pytorch_does(
    case: Case, edges: ModelInputs, num_rows: int
) -> None:
    batch = edges.block(0, num_rows)
    gap = np.abs(case.load_source()(batch) - case.load(case.openvino)(batch))
    assert gap.max() < 1e-5


@pytest.mark.parametrize("name", ["openvino-fp32", "openvino-int8"])
def test_the_files_say_where_they_come_from(case: Case, name: str) -> None:
    one = next(variant for variant in case.built if variant.name == name)
    assert one.files is not None
    model = read_ir(case.store.path(one.files))
    expected = one.provenance
    assert {key: model.get_rt_info(["falaj", key]).astype(str) for key in expected} == expected
    assert expected["precision"] == one.precision
    assert expected["program_sha256"] == case.program.program.sha256
    assert ("calibration_sha256" in expected) == (one.precision == "int8")


def test_two_conversions_give_the_same_bytes(case: Case, store: ArtifactStore) -> None:
    rows = dataset(store)
    program = registered(store, rows, case.store.path(case.program.program).read_bytes())
    _, again, int8 = built(program, rows, case.config, store)
    for old, new in ((case.openvino, again), (case.int8, int8)):
        assert old.files is not None
        assert new.files is not None
        assert new.files.sha256 == old.files.sha256


def test_an_operator_that_openvino_lacks_leaves_the_onnx_form_standing(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig
) -> None:
    network = Elementwise(lambda numbers: torch.linalg.det(numbers[:, :4].reshape(-1, 2, 2)))
    program = registered(store, rows, exported(network))
    onnx, openvino, int8 = built(program, rows, quick, store)
    assert onnx.failure is None
    assert openvino.failure is not None
    assert "OpenVINO cannot convert the ONNX file" in openvino.failure
    assert "Det-20" in openvino.failure
    assert int8.failure == f"it is made from openvino-fp32, which failed: {openvino.failure}"


def test_a_refused_write_is_a_storage_error(case: Case, store: ArtifactStore) -> None:
    assert case.openvino.files is not None
    model = read_ir(case.store.path(case.openvino.files))
    store.root.parent.mkdir(exist_ok=True)
    store.root.write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="OpenVINO could not write the model"):
        save_ir(model, store.root, {})


@pytest.mark.slow
def test_openvino_and_nncf_report_nothing_and_leave_logging_alone(case: Case) -> None:
    program = """
        import logging, sys
        calls = []
        def watch(event, details):
            if event in {"socket.connect", "socket.getaddrinfo", "subprocess.Popen"}:
                calls.append((event, details))
        sys.addaudithook(watch)
        from pathlib import Path
        from tasks.conversion.targets.openvino import convert_onnx, without_reporting
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
