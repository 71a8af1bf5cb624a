from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import BuiltVariant
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.targets.interface import ModelInputs
from tasks.conversion.targets.onnx import MODEL_FILE, encoding_nodes
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import (
    ClashingNames,
    Elementwise,
    build_one,
    exported,
    registered,
)
from tests.support.data.builders import dataset


@pytest.fixture
def rows(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1024])
@pytest.mark.parametrize(("form", "most"), [("onnx", 1e-6), ("openvino", 1e-5)])
def test_any_number_of_rows_scores_as_pytorch_does(
    case: Case, edges: ModelInputs, num_rows: int, form: str, most: float
) -> None:
    batch = edges.block(0, num_rows)
    converted = case.load(getattr(case, form))
    assert np.abs(case.load_source()(batch) - converted(batch)).max() < most


def test_parameters_named_like_inputs_and_output_do_not_break_the_file(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig, edges: ModelInputs
) -> None:
    program = registered(store, rows, exported(ClashingNames()))
    built = build_one("onnx-fp32", program, rows, quick, store)
    assert built.failure is None
    case = Case(store, rows, program, quick, built, built, built)
    gap = np.abs(case.load_source()(edges) - case.load(built)(edges))
    assert gap.max() < 1e-6


def test_an_operator_that_onnx_lacks_is_a_sentence_that_is_kept(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig
) -> None:
    network = Elementwise(lambda numbers: torch.special.gammaln(numbers).sum(1))
    program = registered(store, rows, exported(network))
    built = build_one("onnx-fp32", program, rows, quick, store)
    assert built.files is None
    assert built.failure is not None
    assert "cannot be written as ONNX opset 20: No ONNX function found" in built.failure
    assert "lgamma" in built.failure
    assert [p.name for p in (store.root / "variants").rglob("*") if p.is_file()] == ["value.json"]


@pytest.fixture(scope="module")
def fp16(case: Case) -> BuiltVariant:
    return build_one("onnx-fp16", case.program, case.rows, case.config, case.store, case.onnx)


@pytest.fixture(scope="module")
def int8(case: Case) -> BuiltVariant:
    return build_one("onnx-int8", case.program, case.rows, case.config, case.store, case.onnx)


def _halved_model(case: Case, one: BuiltVariant) -> onnx.ModelProto:
    assert one.failure is None
    assert one.files is not None
    return onnx.load(case.store.path(one.files) / MODEL_FILE)


def _gap(case: Case, one: BuiltVariant, inputs: ModelInputs) -> float:
    return float(np.abs(case.load_source()(inputs) - case.load(one)(inputs)).max())


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_fewer_bits_stay_within_their_bound_on_edge_rows_too(
    case: Case,
    typical: ModelInputs,
    edges: ModelInputs,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    for inputs in (typical, edges):
        assert 0 < _gap(case, request.getfixturevalue(name), inputs) < TABULAR.bounds[name].max_gap


def test_half_precision_begins_behind_the_encoding_of_raw_numbers(
    case: Case, fp16: BuiltVariant
) -> None:
    before, after = _halved_model(case, case.onnx), _halved_model(case, fp16)
    encoding = set(encoding_nodes(before))
    assert {"IsNaN", "Clip", "Concat"} & {n.op_type for n in before.graph.node}
    kept = {node.name: list(node.output) for node in before.graph.node if node.name in encoding}
    assert kept == {n.name: list(n.output) for n in after.graph.node if n.name in encoding}
    widths = {t.data_type for t in after.graph.initializer if len(t.dims) == 2}
    assert widths == {TensorProto.FLOAT16}
    types = [v.type.tensor_type.elem_type for v in (*after.graph.input, *after.graph.output)]
    assert types == [TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT]


def test_only_matrix_products_are_quantised_with_zero_points_of_zero(
    case: Case, int8: BuiltVariant
) -> None:
    graph = _halved_model(case, int8).graph
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    dequantized = {pair.output[0] for pair in pairs}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 4
    assert all({*node.input[:2]} <= dequantized for node in products)
    quantized = [node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"]
    outputs = {node.output[0] for node in products}
    assert outputs <= set(quantized)  # without these ONNX Runtime multiplies in floats
    assert not any(weights[pair.input[2]].any() for pair in pairs)
    assert {weights[pair.input[2]].dtype for pair in pairs} == {np.dtype(np.int8)}
    assert len([pair for pair in pairs if weights[pair.input[1]].ndim == 1]) == 4  # by column
    assert int8.settings["calibration_rows"] == "1951"


def test_onnx_runtime_multiplies_in_integers(
    case: Case, int8: BuiltVariant, tmp_path: Path
) -> None:
    assert int8.files is not None
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that the written graph is for this machine
    path = case.store.path(int8.files) / MODEL_FILE
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    kinds = [node.op_type for node in optimized.graph.node]
    assert kinds.count("QGemm") == 3
    assert kinds.count("QLinearMatMul") == 1
    assert not {"MatMul", "Gemm", "FusedGemm"} & set(kinds)


@pytest.mark.parametrize("name", ["onnx-fp16", "onnx-int8"])
def test_two_narrower_conversions_give_the_same_bytes(
    case: Case, name: str, tmp_path: Path
) -> None:
    first = build_one(name, case.program, case.rows, case.config, case.store, case.onnx)
    store = ArtifactStore(tmp_path / "artifacts")
    for artifact in (case.program.program, case.onnx.files, case.dataset.snapshot.data):
        assert artifact is not None
        source = case.store.path(artifact).parent
        shutil.copytree(source, store.root / source.relative_to(case.store.root))
    again = build_one(name, case.program, case.rows, case.config, store, case.onnx)
    assert again.files == first.files
