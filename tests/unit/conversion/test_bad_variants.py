"""A seeded set of forms that go wrong: every one is dropped for its own reason, good ones pass.

All of them say that they are what they should be: only what they answer betrays them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.contracts.release import BuiltVariant
from tasks.conversion.examine import examine, take_reference
from tests.support.conversion.cases import Case, TextCase
from tests.support.conversion.forging import Edit, changed, edited
from tests.support.conversion.programs import Decided, build_one, tabular_job
from tests.support.data.builders import COLUMNS
from tests.support.suite.promises import Promise, proves


def _consumers(model: onnx.ModelProto, name: str) -> list[tuple[onnx.NodeProto, int]]:
    return [
        (node, position)
        for node in model.graph.node
        for position, used in enumerate(node.input)
        if used == name
    ]


def behind(model: onnx.ModelProto, name: str, *nodes: onnx.NodeProto) -> None:
    """Let everything that read the input `name` read the last of these nodes instead."""
    for node, position in _consumers(model, name):
        node.input[position] = nodes[-1].output[0]
    for offset, node in enumerate(nodes):
        model.graph.node.insert(offset, node)


def before(model: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Let these nodes make the output out of `inner`, which is what the graph gave."""
    name = model.graph.output[0].name
    for node in model.graph.node:
        for position, made in enumerate(node.output):
            if made == name:
                node.output[position] = "inner"
    for node, position in _consumers(model, name):
        node.input[position] = "inner"
    model.graph.node.extend(nodes)


def constant(model: onnx.ModelProto, name: str, values: np.ndarray) -> str:
    model.graph.initializer.append(numpy_helper.from_array(values, f"bad_{name}"))
    return f"bad_{name}"


def weights(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Tables of floats with two axes, the largest last."""
    found = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    ]
    return sorted(found, key=lambda tensor: int(np.prod(tensor.dims)))


def rewrite(tensor: onnx.TensorProto, change: Callable[[np.ndarray], np.ndarray]) -> None:
    values = change(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))


# What is done to any family's form.


def one_wrong_row_of_weights(model: onnx.ModelProto) -> None:
    """One line of the largest table is zeroed."""

    def change(values: np.ndarray) -> np.ndarray:
        values[np.abs(values).sum(1).argmax()] = 0
        return values

    rewrite(weights(model)[-1], change)


def noise(model: onnx.ModelProto) -> None:
    """Answers that change from one call to the next, by less than the bound of their gap."""
    before(
        model,
        helper.make_node("RandomNormalLike", ["inner"], ["noise"], mean=0.0, scale=7e-7),
        helper.make_node("Add", ["inner", "noise"], [model.graph.output[0].name]),
    )


def reversed_calls(model: onnx.ModelProto) -> None:
    """Answers in the opposite order of the rows: the batch axis is mixed up."""
    starts, ends, axes, steps = (
        constant(model, key, np.array([value], np.int64))
        for key, value in (("starts", -1), ("ends", -(2**62)), ("axes", 0), ("steps", -1))
    )
    name = model.graph.output[0].name
    before(model, helper.make_node("Slice", ["inner", starts, ends, axes, steps], [name]))


# What is done to a form that takes a table.


def swapped_columns(model: onnx.ModelProto) -> None:
    last = len(COLUMNS.numeric) - 1
    order = constant(model, "order", np.array([1, 0, *range(2, last + 1)], np.int64))
    behind(model, "numeric", helper.make_node("Gather", ["numeric", order], ["swapped"], axis=1))


def next_code(model: onnx.ModelProto) -> None:
    """Every code one too high: an off-by-one of the categories."""
    one = constant(model, "one", np.int32(1))
    behind(model, "categorical", helper.make_node("Add", ["categorical", one], ["higher"]))


def missing_reaches_the_result(model: onnx.ModelProto) -> None:
    """A missing number gives NaN."""
    axes, zero = (
        constant(model, "axes", np.array([1], np.int64)),
        constant(model, "nothing", np.float32(0)),
    )
    before(
        model,
        helper.make_node("Mul", ["numeric", zero], ["nothings"]),
        helper.make_node("ReduceSum", ["nothings", axes], ["nothings_of_row"], keepdims=0),
        helper.make_node("Add", ["inner", "nothings_of_row"], [model.graph.output[0].name]),
    )


# What is done to a form that takes texts.


def no_mask(model: onnx.ModelProto) -> None:
    """Padding counts as text."""
    one = constant(model, "always", np.int64(1))
    behind(model, "attention_mask", helper.make_node("Max", ["attention_mask", one], ["seen"]))


def other_length(model: onnx.ModelProto) -> None:
    """Embeddings 3 % too long: a wrong normalisation, which no cosine sees."""
    name = model.graph.output[0].name
    longer = constant(model, "longer", np.float32(1.03))
    before(model, helper.make_node("Mul", ["inner", longer], [name]))


@dataclass(frozen=True)
class Bench:
    """A family's case, and how a form of it is examined."""

    case: Case | TextCase
    good: BuiltVariant

    def failure(self, change: Callable[[Path], None] = lambda folder: None) -> str | None:
        case = self.case
        return examine(changed(case.store, self.good, change), take_reference(case)).failure


@pytest.fixture(scope="module")
def decided(case: Case) -> Case:
    """A form of a network whose answers are far apart."""
    job = tabular_job(case.store, Decided())
    return replace(case, program=job.program, onnx=build_one("onnx-fp32", job))


@pytest.fixture(scope="module")
def table(decided: Case) -> Bench:
    return Bench(decided, decided.onnx)


@pytest.fixture(scope="module")
def words(texts: TextCase) -> Bench:
    return Bench(texts, texts.built["onnx-fp32"])


@pytest.mark.parametrize("kind", ["table", "words"])
def test_the_good_form_passes(kind: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(kind)
    assert bench.failure() is None
    assert bench.failure(edited(lambda model: None)) is None


ANY = (one_wrong_row_of_weights, noise, reversed_calls)
TABULAR_EDITS = (*ANY, swapped_columns, next_code, missing_reaches_the_result)
TEXT_EDITS = (*ANY, no_mask, other_length)
BAD = [("table", edit) for edit in TABULAR_EDITS] + [("words", edit) for edit in TEXT_EDITS]


@proves(Promise.CONVERSION, "a seeded set of bad forms, of both families, is caught")
@pytest.mark.parametrize(("kind", "edit"), BAD, ids=lambda value: getattr(value, "__name__", value))
def test_a_bad_form_is_caught(kind: str, edit: Edit, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(kind)
    assert ("expected the same answer each time" in bench.failure(edited(edit))) == (edit is noise)
