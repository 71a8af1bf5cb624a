"""ONNX in 16-bit floats, for graphics processors; raw values are still encoded in 32 bits.

ONNX Runtime has a converter too. It halves every input before anything reads it, also what is kept
in 32 bits, and leaves nodes out of order, so that the checker refuses the file.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tasks.kernel.errors import ConversionError

MATRIX_PRODUCTS = ("MatMul", "Gemm")
LARGEST = 65504.0  # that 16 bits hold
SMALLEST_INFINITY = 65520.0  # is rounded to infinity
_BEYOND, _INFINITY = "falaj_beyond_half", "falaj_infinity"
# Operators that ONNX or its runtimes do not have for 16-bit floats.
IN_32_BITS = ("CumSum", "NonMaxSuppression", "Range", "Resize", "TopK", "Upsample")
_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def halve(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in 16-bit floats behind the encoding of its inputs.

    Raises:
        ConversionError: it has branches or loops, whose inner graphs are not looked into.
    """
    if any(a.type == onnx.AttributeProto.GRAPH for n in model.graph.node for a in n.attribute):
        raise ConversionError(
            "the model has a branch or a loop, and 16-bit floats are set up for plain graphs only"
        )
    halved = onnx.ModelProto()
    halved.CopyFrom(model)
    _Halving(halved).run()
    return halved


def with_overflows(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with infinity wherever a 16-bit float cannot hold a value.

    On processors ONNX Runtime computes such a model in 32 bits, at any level of optimisation, and
    gives numbers where a graphics processor gives infinity. With these nodes both overflow alike.
    """
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    halves = {v.name for v in inferred.value_info if v.type.tensor_type.elem_type == _HALF}
    nodes = []
    for node in checked.graph.node:
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name in halves:
                node.output[position] = f"{name}__unbounded"
                nodes += _overflowing(f"{name}__unbounded", name)
    del checked.graph.node[:]
    checked.graph.node.extend(nodes)
    for name, value in ((_BEYOND, SMALLEST_INFINITY), (_INFINITY, np.inf)):
        checked.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    return checked


def _overflowing(source: str, target: str) -> list[onnx.NodeProto]:
    """Nodes that give `source`, and infinity where its size is beyond 16 bits."""
    whole, size, beyond, bounded = (
        f"{target}__{k}" for k in ("whole", "size", "beyond", "bounded")
    )
    return [
        helper.make_node("Cast", [source], [whole], to=_FLOAT),
        helper.make_node("Abs", [whole], [size]),
        helper.make_node("GreaterOrEqual", [size, _BEYOND], [beyond]),
        helper.make_node("Where", [beyond, _INFINITY, whole], [bounded]),
        helper.make_node("Cast", [bounded], [target], to=_HALF),
    ]


class _Halving:
    """One pass over the nodes in their order; casts are put in where the width changes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._kept = set(encoding_nodes(model))
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self._floats = {v.name for v in values if v.type.tensor_type.elem_type == _FLOAT}
        self._weights = {t.name: t for t in self._graph.initializer if t.data_type == _FLOAT}
        self._halved: set[str] = set()
        self._made: set[str] = set()
        self._nodes: list[onnx.NodeProto] = []

    def run(self) -> None:
        outputs = {value.name for value in self._graph.output} & self._floats
        for node in list(self._graph.node):
            is_halved = node.name not in self._kept and node.op_type not in IN_32_BITS
            for position, name in enumerate(node.input):
                node.input[position] = self._as_half(name) if is_halved else self._as_float(name)
            self._nodes.append(node)
            if is_halved:
                self._halve_outputs(node, outputs)
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        self._drop_unread_weights()

    def _halve_outputs(self, node: onnx.NodeProto, outputs: set[str]) -> None:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _FLOAT:
                attribute.i = _HALF
        for position, name in enumerate(node.output):
            if name in outputs:
                node.output[position] = f"{name}__half"
                self._cast(f"{name}__half", name, _FLOAT)
            elif name in self._floats:
                self._halved.add(name)

    def _as_half(self, name: str) -> str:
        if name in self._halved or name not in self._floats | self._weights.keys():
            return name
        half = f"{name}__half"
        if half not in self._made:
            self._made.add(half)
            if name in self._weights:
                values = numpy_helper.to_array(self._weights[name])
                clipped = np.clip(values, -LARGEST, LARGEST).astype(np.float16)
                self._graph.initializer.append(numpy_helper.from_array(clipped, half))
            else:
                self._cast(name, half, _HALF)
        return half

    def _as_float(self, name: str) -> str:
        if name not in self._halved:
            return name
        whole = f"{name}__float"
        if whole not in self._made:
            self._made.add(whole)
            self._cast(name, whole, _FLOAT)
        return whole

    def _cast(self, source: str, target: str, width: int) -> None:
        self._nodes.append(
            helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=width)
        )

    def _drop_unread_weights(self) -> None:
        read = {name for node in self._graph.node for name in node.input}
        kept = [tensor for tensor in self._graph.initializer if tensor.name in read]
        del self._graph.initializer[:]
        self._graph.initializer.extend(kept)


def encoding_nodes(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes that no matrix product comes before: the encoding of raw values.

    Raw numbers have heavy tails and large ranges, and lose too much in few bits. What leaves the
    first matrix product is the network's own. Tables that integers look up are no encoding.
    """
    tables = {tensor.name for tensor in model.graph.initializer}
    reached: set[str] = set()
    encoding = []
    for node in model.graph.node:  # an ONNX graph lists its nodes in an order of computation
        if node.op_type in MATRIX_PRODUCTS or reached.intersection(node.input):
            reached.update(node.output)
        elif not (node.op_type == "Gather" and node.input[0] in tables):
            encoding.append(node.name)
    return encoding
