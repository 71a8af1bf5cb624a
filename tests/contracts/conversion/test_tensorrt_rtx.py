"""Will TensorRT take what the conversion writes for it? Asked of TensorRT-RTX's parser and builder.

`make tools` makes an environment with it for these; `make test-tensorrt-rtx` runs them alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from infra.tensorrt_rtx.asking import NAME, Opinion, ask
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.conversion.targets.tensorrt_engine import ShapeRange, shape_ranges
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore, tool_python
from tests.support.conversion.programs import SmallNetwork, built, exported, registered
from tests.support.data import encoders
from tests.support.data.builders import dataset

pytestmark = pytest.mark.slow

PYTHON = tool_python(NAME)
needs_tensorrt_rtx = pytest.mark.skipif(
    PYTHON is None, reason="TensorRT-RTX has an environment of its own: `make test-tensorrt-rtx`"
)
FORMATS = ("onnx-fp32", "onnx-fp16", "onnx-int8")
CONFIG = ConversionConfig(formats=FORMATS)


def opinions(program: RegisteredProgram, paths: list[Path]) -> tuple[Opinion, ...]:
    assert PYTHON is not None
    ranges = shape_ranges(program.signature, typical_rows=32, most_rows=1024)
    return ask(PYTHON, dict.fromkeys(paths, ranges))


@needs_tensorrt_rtx
@pytest.mark.parametrize("family", ["tabular", "text-embedding"])
def test_an_engine_is_built_of_every_onnx_form(tmp_path: Path, family: str) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    if family == "tabular":
        rows = dataset(store)
        program = registered(store, rows, exported(SmallNetwork()))
        forms = built(program, rows, CONFIG, store)
    else:
        program = encoders.registered(store, "encoder")
        forms = built(program, encoders.prepared(store), CONFIG, store)
    assert sorted(form.name for form in forms) == sorted(FORMATS)
    paths = [store.path(form.files) / MODEL_FILE for form in forms if form.files]
    answers = opinions(program, paths)
    assert [(a.supported, a.refusal) for a in answers] == [(True, None)] * len(FORMATS)
    assert all(answer.engine_bytes > 100_000 for answer in answers)


def _product(path: Path, *, node: onnx.NodeProto | None = None) -> Path:
    """A model of one matrix product with a bias, as small as there is."""
    weights = [
        onnx.numpy_helper.from_array(np.full((4, 4), 0.3, np.float32), "w"),
        onnx.numpy_helper.from_array(np.full(4, 0.1, np.float32), "b"),
    ]
    graph = helper.make_graph(
        [node or helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="product")],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        weights,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    # Else the quantiser advises it, on the root logger.
    helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    onnx.save(model, path)
    return path


class _One(CalibrationDataReader):
    def __init__(self) -> None:
        self._calls = iter([{"x": np.ones((2, 4), np.float32)}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._calls, None)


@needs_tensorrt_rtx
def test_what_tensorrt_does_not_take_is_told(tmp_path: Path) -> None:
    """A bias in 32-bit integers, as ONNX Runtime quantises by itself, and one of its own nodes."""
    plain = _product(tmp_path / "plain.onnx")
    quantize_static(
        plain, tmp_path / "bias.onnx", _One(), weight_type=QuantType.QInt8, per_channel=False
    )
    own = helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft")
    _product(tmp_path / "own.onnx", node=own)
    assert PYTHON is not None
    ranges = {"x": ShapeRange((1, 4), (8, 4), (32, 4))}
    names = ("plain.onnx", "bias.onnx", "own.onnx")
    good, *bad = ask(PYTHON, {tmp_path / name: ranges for name in names})
    assert good.supported
    assert good.refusal is None
    assert [answer.supported for answer in bad] == [False, False]
    assert all("does not take the ONNX model" in str(answer.refusal) for answer in bad)
    assert "Int32" in str(bad[0].refusal)
    assert "FusedMatMul" in str(bad[1].refusal)


def test_an_environment_without_tensorrt_rtx_is_named(tmp_path: Path) -> None:
    file = _product(tmp_path / "plain.onnx")
    with pytest.raises(
        ConversionError, match=r"ended with 1 and no answer: .*tensorrt_rtx_binding"
    ):
        ask(Path(sys.executable), {file: {}})
