"""Tensors and columns that no model takes, over gRPC and HTTP, without a server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from open_inference.grpc.protocol import ModelInferRequest

from serving.config import ServingConfig
from serving.errors import BadRequestError, NotReadyError
from serving.interfaces import Array, Call
from serving.protocol.answers import MOST_MESSAGE, bounded
from serving.protocol.front import Front
from serving.protocol.grpc.service import sent_inputs
from serving.protocol.plans import ModelPlan
from serving.protocol.tensors import Sent, read_columns
from serving.security.guard import OpenGuard
from tests.support.serving.inline_engine import SIGNATURE


def request(shape: list[int], values: int, **other: Any) -> Any:
    made = ModelInferRequest(model_name="sums")
    contents = {"fp32_contents": [1.0] * values}
    made.inputs.add(name="numeric", datatype="FP32", shape=shape, contents=contents, **other)
    return made


@pytest.mark.parametrize(
    ("shape", "values"),
    [([1] * 70, 1), ([1] * 9, 1), ([2**62, -1], 0), ([2**32, 2**32], 0), ([0, 3], 0), ([], 1)],
)
def test_a_shape_that_no_array_has_is_the_clients_fault(shape: list[int], values: int) -> None:
    for read in (ModelPlan(SIGNATURE).arrays, read_columns):
        with pytest.raises(BadRequestError):
            read(sent_inputs(request(shape, values)))


def columns_of(read: str, values: Array) -> dict[str, list[Any]]:
    """A column as each form of a request by entities brings it."""
    named = {"name": "distance", "datatype": "FP64", "shape": [len(values)]}
    if read == "http":
        return read_columns([Sent(**named, raw=memoryview(values.tobytes()))])  # type: ignore[arg-type]
    asked = ModelInferRequest(model_name="sums")
    tensor = asked.inputs.add(**named)
    if read == "raw":
        asked.raw_input_contents.append(values.tobytes())
    else:
        tensor.contents.fp64_contents.extend(values.tolist())
    return read_columns(sent_inputs(asked))


@pytest.mark.parametrize("read", ["http", "raw", "typed"])
def test_a_column_of_entities_has_no_infinity_and_nan_is_a_missing_number(read: str) -> None:
    assert columns_of(read, np.array([1, np.nan])) == {"distance": [1, None]}
    with pytest.raises(BadRequestError, match="infinite"):
        columns_of(read, np.array([1, -np.inf]))


def test_a_refusal_repeats_no_more_than_a_page_of_what_was_sent() -> None:
    assert bounded("a" * MOST_MESSAGE) == "a" * MOST_MESSAGE
    assert len(bounded("a" * 10**6)) < MOST_MESSAGE + 10


def test_features_read_for_one_signature_are_given_to_no_other() -> None:
    other = SIGNATURE.model_copy(update={"inputs": SIGNATURE.inputs[:1]})
    signatures = [other, SIGNATURE]
    engine: Any = SimpleNamespace(signature=lambda *asked: signatures.pop())

    class Reader:
        async def resolve(self, *asked: object) -> Any:
            return {"numeric": np.zeros((1, 3), np.float32)}, None

    config, entities = ServingConfig(), {"tailnum": ["N1"]}
    front = Front(engine, OpenGuard(config), config, (), Reader())  # type: ignore[arg-type]
    with pytest.raises(NotReadyError, match="changed while the features were read"):
        asyncio.run(front.resolve(Call("sums", {}, 0, "r", entities=entities)))
