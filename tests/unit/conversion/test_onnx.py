from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.targets.interface import ModelInputs
from tasks.conversion.targets.onnx import MODEL_FILE, encoding_nodes
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import Elementwise, build_one, tabular_job


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1024])
@pytest.mark.parametrize(("form", "most"), [("onnx", 1e-6), ("openvino", 1e-5)])
def test_any_number_of_rows_scores_as_pytorch_does(
    case: Case, edges: ModelInputs, num_rows: int, form: str, most: float
) -> None:
    batch = edges.block(0, num_rows)
    assert np.abs(case.load_source()(batch) - case.load(getattr(case, form))(batch)).max() < most


def test_an_operator_that_onnx_lacks_is_a_sentence_that_is_kept(store: ArtifactStore) -> None:
    network = Elementwise(lambda numbers: torch.special.gammaln(numbers).sum(1))
    built = build_one("onnx-fp32", tabular_job(store, network))
    assert built.files is None
    assert "cannot be written as ONNX opset 20: No ONNX function found" in built.failure
    assert "lgamma" in built.failure
    assert [p.name for p in (store.root / "variants").rglob("*") if p.is_file()] == ["value.json"]


@pytest.mark.parametrize("name", ["onnx-fp16", "onnx-int8", "openvino-int8"])
def test_fewer_bits_stay_within_their_bound_on_edge_rows_too(
    case: Case, typical: ModelInputs, edges: ModelInputs, name: str
) -> None:
    one = build_one(name, case, case.onnx, case.openvino)
    for inputs in (typical, edges):
        gap = np.abs(case.load_source()(inputs) - case.load(one)(inputs)).max()
        assert 0 < gap < TABULAR.bounds[one.precision].max_gap


def _graph(case: Case, name: str) -> onnx.GraphProto:
    made = case.onnx if name == "onnx-fp32" else build_one(name, case, case.onnx)
    return onnx.load(case.store.path(made.files) / MODEL_FILE).graph


def test_half_precision_begins_behind_the_encoding_of_raw_numbers(case: Case) -> None:
    before, after = _graph(case, "onnx-fp32"), _graph(case, "onnx-fp16")
    encoding = set(encoding_nodes(onnx.helper.make_model(before)))
    assert {"IsNaN", "Clip", "Concat"} & {n.op_type for n in before.node}
    kept = {node.name: list(node.output) for node in before.node if node.name in encoding}
    assert kept == {n.name: list(n.output) for n in after.node if n.name in encoding}
    assert {t.data_type for t in after.initializer if len(t.dims) == 2} == {TensorProto.FLOAT16}
    types = [v.type.tensor_type.elem_type for v in (*after.input, *after.output)]
    assert types == [TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT]


def test_only_matrix_products_are_quantised_with_zero_points_of_zero(case: Case) -> None:
    graph = _graph(case, "onnx-int8")
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 4
    dequantized = {pair.output[0] for pair in pairs}
    assert all({*node.input[:2]} <= dequantized for node in products)
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    # Without these ONNX Runtime multiplies in floats.
    assert {node.output[0] for node in products} <= quantized
    zeros = [weights[pair.input[2]] for pair in pairs]
    assert not any(zero.any() for zero in zeros)
    assert {zero.dtype for zero in zeros} == {np.dtype(np.int8)}
    assert len([pair for pair in pairs if weights[pair.input[1]].ndim == 1]) == 4  # by column


def test_onnx_runtime_multiplies_in_integers(case: Case, tmp_path: Path) -> None:
    int8 = build_one("onnx-int8", case, case.onnx)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that the written graph is for this machine
    path = case.store.path(int8.files) / MODEL_FILE
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QGemm") == 3
    assert kinds.count("QLinearMatMul") == 1
    assert not {"MatMul", "Gemm", "FusedGemm"} & set(kinds)
