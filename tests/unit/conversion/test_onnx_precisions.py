"""The ONNX forms in 16-bit floats and in 8-bit integers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.contracts.release import BuiltVariant
from tasks.conversion.config import ConversionConfig
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.targets.onnx import MODEL_FILE, quantize_onnx
from tasks.conversion.targets.onnx_halving import encoding_nodes, halve, with_overflows
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import build_one
from tests.support.data.builders import dataset, frame, month


@pytest.fixture(scope="module")
def fp16(case: Case) -> BuiltVariant:
    return build_one("onnx-fp16", case.program, case.rows, case.config, case.store, case.onnx)


@pytest.fixture(scope="module")
def int8(case: Case) -> BuiltVariant:
    return build_one("onnx-int8", case.program, case.rows, case.config, case.store, case.onnx)


def _model(case: Case, one: BuiltVariant) -> onnx.ModelProto:
    assert one.failure is None
    assert one.files is not None
    return onnx.load(case.store.path(one.files) / MODEL_FILE)


def _gap(case: Case, one: BuiltVariant, inputs: ModelInputs) -> float:
    return float(np.abs(case.load_source()(inputs) - case.load(one)(inputs)).max())


def test_half_precision_stays_within_its_bound_on_edge_rows_too(
    case: Case, fp16: BuiltVariant, typical: ModelInputs, edges: ModelInputs
) -> None:
    for inputs in (typical, edges):
        assert 0 < _gap(case, fp16, inputs) < TABULAR.bounds["fp16"].max_gap


def test_half_precision_overflows_on_a_processor_as_it_does_elsewhere() -> None:
    """ONNX Runtime computes 16 bits in 32 there, and 300 * 300 * 300 is none of its trouble."""
    table = numpy_helper.from_array(np.float16([[300]]), "table")
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
            helper.make_node("MatMul", ["half", "table"], ["large"]),
            helper.make_node("Mul", ["large", "table"], ["larger"]),
            helper.make_node("Cast", ["larger"], ["y"], to=TensorProto.FLOAT),
        ],
        "overflow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [table],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    answers = []
    for form in (model, with_overflows(model)):
        onnx.checker.check_model(form, full_check=True)
        session = ort.InferenceSession(form.SerializeToString(), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"x": np.float32([[0.5], [300], [-300]])})
        answers.append(found[:, 0].tolist())
    assert answers[0] == pytest.approx([45000, 2.7e7, -2.7e7], rel=1e-3)
    assert answers[1] == pytest.approx([45000, np.inf, np.inf], rel=1e-3)


def test_half_precision_begins_behind_the_encoding_of_raw_numbers(
    case: Case, fp16: BuiltVariant
) -> None:
    before, after = _model(case, case.onnx), _model(case, fp16)
    encoding = set(encoding_nodes(before))
    assert {"IsNaN", "Clip", "Concat"} & {n.op_type for n in before.graph.node}
    kept = {node.name: list(node.output) for node in before.graph.node if node.name in encoding}
    assert kept == {n.name: list(n.output) for n in after.graph.node if n.name in encoding}
    widths = {t.data_type for t in after.graph.initializer if len(t.dims) == 2}
    assert widths == {TensorProto.FLOAT16}
    types = [v.type.tensor_type.elem_type for v in (*after.graph.input, *after.graph.output)]
    assert types == [TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT]


def test_weights_beyond_the_range_of_16_bits_are_cut_and_the_gate_sees_it() -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, (1, 1), [1e6])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    halved = halve(model)
    onnx.checker.check_model(halved, full_check=True)
    assert onnx.numpy_helper.to_array(halved.graph.initializer[0]).tolist() == [[65504.0]]
    assert model.graph.initializer[0].float_data == [1e6]  # the source is left alone


def test_a_branch_in_the_graph_is_refused_with_a_sentence() -> None:
    def branch(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info("b", TensorProto.FLOAT, [1])
        constant = helper.make_tensor("c", TensorProto.FLOAT, [1], [1.0])
        return helper.make_graph(
            [helper.make_node("Constant", [], ["b"], value=constant)], name, [], [out]
        )

    node = helper.make_node("If", ["x"], ["y"], then_branch=branch("t"), else_branch=branch("e"))
    graph = helper.make_graph(
        [node],
        "branching",
        [helper.make_tensor_value_info("x", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    with pytest.raises(ConversionError, match="has a branch or a loop"):
        halve(helper.make_model(graph))


def test_integers_stay_within_their_bound(
    case: Case, int8: BuiltVariant, typical: ModelInputs, edges: ModelInputs
) -> None:
    for inputs in (typical, edges):
        assert 0 < _gap(case, int8, inputs) < TABULAR.bounds["int8"].max_gap


def test_only_matrix_products_are_quantised_with_zero_points_of_zero(
    case: Case, int8: BuiltVariant
) -> None:
    graph = _model(case, int8).graph
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


def test_both_say_where_they_come_from(case: Case, fp16: BuiltVariant, int8: BuiltVariant) -> None:
    for one in (fp16, int8):
        props = {p.key: p.value for p in _model(case, one).metadata_props}
        assert props["falaj.program_sha256"] == case.program.program.sha256
        assert props["falaj.precision"] == one.precision
        assert one.settings["made_from"] == "onnx-fp32"


@pytest.mark.parametrize("name", ["onnx-fp16", "onnx-int8"])
def test_two_conversions_give_the_same_bytes(case: Case, name: str, tmp_path: Path) -> None:
    first = build_one(name, case.program, case.rows, case.config, case.store, case.onnx)
    store = ArtifactStore(tmp_path / "artifacts")
    for artifact in (case.program.program, case.onnx.files, case.dataset.snapshot.data):
        assert artifact is not None
        source = case.store.path(artifact).parent
        shutil.copytree(source, store.root / source.relative_to(case.store.root))
    again = build_one(name, case.program, case.rows, case.config, store, case.onnx)
    assert again.files == first.files


def test_a_training_window_without_rows_is_a_failure_with_the_reason(case: Case) -> None:
    data = frame(600)
    later = data[data[case.program.raw_columns.event_time] >= month(9).start]
    rows = dataset(case.store, later)
    one = build_one("onnx-int8", case.program, rows, case.config, case.store, case.onnx)
    assert one.failure is not None
    assert "nothing to calibrate INT8 on" in one.failure


def test_an_empty_sample_and_a_model_without_products_are_refused(
    case: Case, tmp_path: Path
) -> None:
    assert case.onnx.files is not None
    path = case.store.path(case.onnx.files) / MODEL_FILE
    with pytest.raises(ConversionError, match="the calibration sample is empty"):
        quantize_onnx(path, ())
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
    )
    onnx.save(helper.make_model(graph), tmp_path / "plain.onnx")
    with pytest.raises(ConversionError, match="has no MatMul or Gemm to quantise, only Relu"):
        quantize_onnx(tmp_path / "plain.onnx", ())


def test_one_row_cannot_calibrate(case: Case) -> None:
    config = ConversionConfig(calibration_rows=1)
    one = build_one("onnx-int8", case.program, case.rows, config, case.store, case.onnx)
    assert one.failure is not None
    assert "1 rows calibrate it" in one.failure
