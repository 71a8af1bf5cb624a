"""Looking at an ONNX graph: which of its values are still raw numbers."""

from __future__ import annotations

import onnx

MATRIX_PRODUCTS = ("MatMul", "Gemm")


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
