"""An ONNX program of the size of the loop's model: 7 categories, 72 numbers, one score a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tasks.contracts.conversion import MOST_ROWS, Signature

CATEGORICAL, NUMERIC = 7, 72
_CODES, _WIDTH, _HIDDEN = 512, 16, (256, 128)

SIGNATURE = Signature.model_validate(
    {
        "inputs": [
            {"name": "categorical", "dtype": "int32", "shape": ("batch", CATEGORICAL)},
            {"name": "numeric", "dtype": "float32", "shape": ("batch", NUMERIC)},
        ],
        "output": {"name": "score", "dtype": "float32", "shape": ("batch",)},
        "largest": {"batch": MOST_ROWS},
    }
)


def write_program(path: Path) -> Path:
    """Embeddings, missing numbers as zero, two hidden layers, a sigmoid; weights are seeded."""
    rng = np.random.default_rng(7)
    weights: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    nodes = [
        helper.make_node("IsNaN", ["numeric"], ["absent"]),
        helper.make_node("Where", ["absent", "zero", "numeric"], ["numbers"]),
        helper.make_node("Cast", ["absent"], ["flags"], to=TensorProto.FLOAT),
    ]
    parts = ["numbers", "flags"]
    for column in range(CATEGORICAL):
        weights[f"table{column}"] = rng.normal(size=(_CODES, _WIDTH)).astype(np.float32)
        nodes += [
            helper.make_node("Gather", ["categorical", f"at{column}"], [f"code{column}"], axis=1),
            helper.make_node("Gather", [f"table{column}", f"code{column}"], [f"part{column}"]),
        ]
        parts.append(f"part{column}")
    nodes.append(helper.make_node("Concat", parts, ["x0"], axis=1))
    width = 2 * NUMERIC + CATEGORICAL * _WIDTH
    for layer, hidden in enumerate((*_HIDDEN, 1)):
        scale = np.float32(1 / np.sqrt(width))
        weights[f"w{layer}"] = rng.normal(size=(width, hidden)).astype(np.float32) * scale
        weights[f"b{layer}"] = np.zeros(hidden, np.float32)
        nodes.append(
            helper.make_node("Gemm", [f"x{layer}", f"w{layer}", f"b{layer}"], [f"y{layer}"])
        )
        kind = "Relu" if layer < len(_HIDDEN) else "Sigmoid"
        nodes.append(helper.make_node(kind, [f"y{layer}"], [f"x{layer + 1}"]))
        width = hidden
    nodes.append(helper.make_node("Squeeze", [f"x{len(_HIDDEN) + 1}", "one"], ["score"]))
    constants = [
        numpy_helper.from_array(np.float32(0), "zero"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
        *(numpy_helper.from_array(np.int64(at), f"at{at}") for at in range(CATEGORICAL)),
        *(numpy_helper.from_array(array, name) for name, array in weights.items()),
    ]
    described = [
        ("categorical", TensorProto.INT32, ["batch", CATEGORICAL]),
        ("numeric", TensorProto.FLOAT, ["batch", NUMERIC]),
        ("score", TensorProto.FLOAT, ["batch"]),
    ]
    inputs = [helper.make_tensor_value_info(*told) for told in described]
    graph = helper.make_graph(nodes, "tabular", inputs[:2], inputs[2:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
