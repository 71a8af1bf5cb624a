import textwrap

import numpy as np
import pytest
import torch

from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.provenance import computes_bf16
from tasks.conversion.targets.interface import ModelInputs
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.conversion.targets.openvino import read_ir, save_ir
from tasks.kernel.errors import StorageError
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import (
    Elementwise,
    build_one,
    built,
    tabular_job,
    with_formats,
)
from tests.support.host.processes import run_python


def test_two_conversions_give_the_same_bytes(case: Case, store: ArtifactStore) -> None:
    content = case.store.path(case.program.program).read_bytes()
    one = with_formats(case, *case.config.formats, "onnx-fp16", "onnx-int8")
    other = tabular_job(store, content, one.config)
    for old, new in zip(built(one), built(other), strict=True):
        assert new.files.sha256 == old.files.sha256


def test_an_operator_that_openvino_lacks_leaves_the_onnx_form_standing(
    store: ArtifactStore,
) -> None:
    network = Elementwise(lambda numbers: torch.linalg.det(numbers[:, :4].reshape(-1, 2, 2)))
    onnx, openvino, int8 = built(tabular_job(store, network))
    assert onnx.failure is None
    assert "OpenVINO cannot convert the ONNX file" in openvino.failure
    assert "Det-20" in openvino.failure
    assert int8.failure == f"it is made from openvino-fp32, which failed: {openvino.failure}"


def test_a_refused_write_is_a_storage_error(case: Case, store: ArtifactStore) -> None:
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
    model = case.store.path(case.onnx.files) / MODEL_FILE
    run_python("-c", textwrap.dedent(program), str(model), check=True)


needs_bf16 = pytest.mark.skipif(not computes_bf16(), reason="this processor computes no bfloat16")


@needs_bf16
def test_bfloat16_is_what_the_loaded_model_says_it_runs_in(
    case: Case, typical: ModelInputs
) -> None:
    model = case.load(build_one("openvino-bf16", case, case.onnx, case.openvino))
    assert model.settings["precision"] == "bf16"
    gap = np.abs(model(typical) - case.load_source()(typical)).max()
    assert 1e-5 < gap < TABULAR.bounds["bf16"].max_gap


def test_only_matrix_products_are_quantised(case: Case) -> None:
    model = read_ir(case.store.path(case.int8.files))
    quantized = [o for o in model.get_ops() if o.get_type_name() == "FakeQuantize"]
    readers = {
        reader.get_node().get_type_name()
        for operation in quantized
        for reader in operation.output(0).get_target_inputs()
    }
    products = [o for o in model.get_ops() if o.get_type_name() == "MatMul"]
    assert readers == {"MatMul"}
    assert len(quantized) == len(products) == 4
