"""Boosted trees in an ONNX file: the matrix products of a program as the operator for trees.

A program holds trees as tensors, see `tasks/training/models/trees.py`, which every format takes. To
walk down a tree is less work, and ONNX Runtime has an operator for it: of what the exporter wrote
for the module `trees`, all goes but that operator. OpenVINO and TensorRT know no trees, and fewer
bits are of no use to them, so these formats are made of the products.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper

from tasks.conversion.targets.interface import Array
from tasks.kernel.errors import ConversionError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

DOMAIN, VERSION = "ai.onnx.ml", 3
"""Operators for trees, in a set that ONNX Runtime has had since 2021."""
SCOPES = "pkg.torch.onnx.name_scopes"
PART = re.compile(r"((?:.*\.)?trees)\.(column|threshold|path|lefts|leaf)_(\d+)")
Groups = list[dict[str, Array]]


def trees_of(program: ExportedProgram) -> tuple[str, Groups] | None:
    """Name of the program's module of trees, and its tensors by group; None where it has none."""
    found: dict[int, dict[str, Array]] = {}
    names = set()
    for name, tensor in program.state_dict.items():
        if match := PART.fullmatch(name):
            names.add(match[1])
            found.setdefault(int(match[3]), {})[match[2]] = tensor.numpy()
    if len(names) != 1 or any(len(group) != 5 for group in found.values()):
        return None
    return names.pop(), [found[number] for number in sorted(found)]


def has_tree_operator(model: onnx.ModelProto) -> bool:
    """Whether a file needs a runtime that knows trees."""
    return any(entry.domain == DOMAIN for entry in model.opset_import)


def put_operator(model: onnx.ModelProto, module: str, groups: Groups) -> None:
    """Let one operator stand for all nodes of a module of trees, in place.

    Args:
        model: as the exporter wrote it, with the names of modules in the nodes' metadata.
        module: name of the module.
        groups: its tensors.

    Raises:
        ConversionError: the nodes of the module are not as expected.
    """
    graph = model.graph
    inner = [node for node in graph.node if module in _scopes(node)]
    made = {name for node in inner for name in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    taken = {name for node in inner for name in node.input} - made - constants - {""}
    others = [node for node in graph.node if module not in _scopes(node)]
    read = {name for node in others for name in node.input} | {v.name for v in graph.output}
    given = made & read
    if len(taken) != 1 or len(given) != 1:
        raise ConversionError(
            f"the {len(inner)} ONNX nodes of module {module!r} take {sorted(taken)} and give "
            f"{sorted(given)}; expected one tensor each. Another release of PyTorch writes its "
            "modules otherwise; tasks/conversion/targets/trees.py has to learn it"
        )
    score, classes = given.pop(), groups[0]["leaf"].shape[2]
    shape = [-1] if classes == 1 else [-1, classes]
    operator = [
        helper.make_node(
            "TreeEnsembleRegressor",
            [taken.pop()],
            [f"{score}__trees"],
            name=f"{module}.operator",
            domain=DOMAIN,
            aggregate_function="SUM",
            n_targets=classes,
            post_transform="NONE",
            **_attributes(groups),
        ),
        helper.make_node(
            "Reshape", [f"{score}__trees", f"{score}__rows"], [score], name=f"{module}.rows"
        ),
    ]
    # In front of the first that reads it: all that it takes comes before that.
    first = next((k for k, node in enumerate(others) if score in node.input), len(others))
    nodes = [*others[:first], *operator, *others[first:]]
    replace_all(graph.node, nodes)
    graph.initializer.append(
        helper.make_tensor(f"{score}__rows", onnx.TensorProto.INT64, [len(shape)], shape)
    )
    used = {name for node in nodes for name in node.input}
    replace_all(graph.initializer, [t for t in graph.initializer if t.name in used])
    model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def replace_all(found: Any, wanted: list[Any]) -> None:
    """Let a repeated field hold these."""
    del found[:]
    found.extend(wanted)


def _scopes(node: onnx.NodeProto) -> tuple[str, ...]:
    texts = [entry.value for entry in node.metadata_props if entry.key == SCOPES]
    return tuple(ast.literal_eval(texts[0])) if texts else ()


NODE = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
Node = tuple[int, int, int, float, str, int, int]
"""A node's entries of the lists that the operator has for `NODE`."""


def _attributes(groups: Groups) -> dict[str, Any]:
    """The operator's lists: one entry a node, and one a leaf."""
    found = [each for number, tree in enumerate(_each(groups)) for each in _nodes(number, *tree)]
    columns = zip(*(node for node, _ in found), strict=True)
    leaves = [(node[0], node[1], weight) for node, weight in found if weight is not None]
    return {
        **{f"nodes_{name}": list(entries) for name, entries in zip(NODE, columns, strict=True)},
        "target_treeids": [tree for tree, _, _ in leaves],
        "target_nodeids": [node for _, node, _ in leaves],
        "target_ids": [tree % groups[0]["leaf"].shape[2] for tree, _, _ in leaves],
        "target_weights": [weight for _, _, weight in leaves],
    }


def _each(groups: Iterable[Mapping[str, Array]]) -> Iterator[tuple[Array, ...]]:
    """Of each tree: columns and thresholds of its questions, ways to its leaves, their values."""
    for group in groups:
        count, wide, _ = group["path"].shape
        columns, thresholds = (group[n].reshape(count, wide) for n in ("column", "threshold"))
        is_leaf = group["lefts"][:, 0] <= wide  # others fill up the group
        for tree in range(count):
            kept = is_leaf[tree]
            ways = group["path"][tree][:, kept]
            values = group["leaf"][tree][kept, tree % group["leaf"].shape[2]]
            yield columns[tree], thresholds[tree], ways, values


def _nodes(
    tree: int, columns: Array, thresholds: Array, ways: Array, values: Array
) -> Iterator[tuple[Node, float | None]]:
    """Nodes of one tree, its root first, and what a leaf weighs."""
    waiting, number = [(0, np.arange(len(values)))], 1
    while waiting:
        node, leaves = waiting.pop()
        if len(leaves) == 1:
            yield (tree, node, 0, 0.0, "LEAF", 0, 0), float(values[leaves[0]])
            continue
        # All leaves below a node lie on one side of the questions above it, and on both of its own.
        here = ways[:, leaves]
        (question,) = np.flatnonzero((here != 0).all(1) & (here > 0).any(1) & (here < 0).any(1))
        column, threshold = int(columns[question]), float(thresholds[question])
        yield (tree, node, column, threshold, "BRANCH_LEQ", number, number + 1), None
        waiting += [(number, leaves[here[question] > 0]), (number + 1, leaves[here[question] < 0])]
        number += 2
