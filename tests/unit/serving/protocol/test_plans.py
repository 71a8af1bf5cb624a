import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serving.errors import BadRequestError
from serving.interfaces import Answer, Array, Served
from serving.protocol.answers import encode_answer
from serving.protocol.messages import parse_request, sent_inputs
from serving.protocol.plans import ModelPlan, Wanted
from serving.protocol.tensors import DATATYPE_OF, NUMPY_OF, exact
from tasks.contracts.conversion import Signature

SERVED = Served("m", "1", "onnx-fp32", "stable", "cpu")
TYPES = ("bool", "uint8", "int32", "int64", "float32")


def signature_of(*inputs: tuple[str, str, tuple[str | int, ...]], **largest: int) -> Signature:
    return Signature.model_validate(
        {
            "inputs": [{"name": n, "dtype": d, "shape": s} for n, d, s in inputs],
            "output": {"name": "score", "dtype": "float32", "shape": ("batch",)},
            "largest": largest,
        }
    )


PLAN = ModelPlan(
    signature_of(("codes", "int32", ("batch", 2)), ("numbers", "float32", ("batch", 3)), batch=100)
)
TEXTS = ModelPlan(
    signature_of(
        ("ids", "int64", ("batch", "tokens")), ("mask", "bool", ("batch", "tokens")), tokens=16
    )
)


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def good(**other: Any) -> dict[str, Any]:
    inputs = [
        tensor("codes", "INT32", [1, 2], [1, 2]),
        tensor("numbers", "FP32", [1, 3], [0.1, None, -3]),
    ]
    return {"inputs": inputs, **other}


def arrays(plan: ModelPlan, told: Any, binary: bytes | None = None) -> dict[str, Array]:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    length = None if binary is None else str(len(body)).encode()
    request, rest = parse_request(body + (binary or b""), length)
    found, rows = plan.arrays(sent_inputs(request, rest))
    plan.wanted(request)
    assert all(len(array) == rows for array in found.values())
    return found


def changed(which: int, **fields: Any) -> dict[str, Any]:
    told = good()
    told["inputs"][which] |= fields
    return told


TAKEN = (
    changed(0, datatype="FP32"),
    changed(1, datatype="FP64", data=[0.5, 1, 2]),
    good(parameters={"anything": 4}),
)
NOT_TAKEN: tuple[Any, ...] = (
    b"",
    b"{",
    b"[" * 100_000,
    {"inputs": "x"},
    {"inputs": []},
    changed(0, name="other"),
    {"inputs": [good()["inputs"][0]] * 2},
    {"inputs": good()["inputs"][:1]},
    changed(0, datatype="BYTES"),
    changed(0, datatype="FP32", data=[1.5, 2]),
    changed(0, datatype="INT64", data=[1, 2**31]),
    changed(0, datatype="BOOL", data=[True, False]),
    changed(1, datatype="FP64", data=[0.1, 1, 2]),
    changed(1, datatype="INT64", data=[2**24 + 1, 1, 2]),
    changed(1, datatype="FP16", data=[1e5, 1, 2]),
    changed(0, data=[1, 2.0]),
    changed(0, data=[1, None]),
    changed(0, data=[1, True]),
    changed(0, data=[1, "2"]),
    changed(0, data=[1, 2**31]),
    changed(0, data=[1, 10**30]),
    changed(1, data=[1e39, 1, 1]),
    changed(1, data=[-1e39, None, 1]),
    b'{"inputs":[{"name":"numbers","datatype":"FP32","shape":[1,3],"data":[1e999,1,1]}]}',
    b'{"inputs":[{"name":"numbers","datatype":"FP32","shape":[1,3],"data":[NaN,1,1]}]}',
    changed(0, data=[1, 2, 3]),
    changed(0, data=[]),
    changed(0, data=[[1], [2]]),
    changed(0, data=[[1, 2], [3, 4]]),
    changed(0, data=[[[1, 2]]]),
    changed(0, data="AAAA"),
    changed(0, shape=[2]),
    changed(0, shape=[]),
    changed(0, shape=[1, 3]),
    changed(0, shape=[0, 2], data=[]),
    changed(0, shape=[-1, 2]),
    changed(0, shape=[2**62, 2]),
    changed(0, shape=[101, 2], data=[1] * 202),
    changed(0, shape=[2, 2], data=[1] * 4),
    changed(0, shape=[1.5, 2]),
    changed(0, parameters={"shared_memory_region": "x"}),
    changed(0, parameters={"binary_data_size": 8}),
    changed(0, parameters={"binary_data_size": -1}),
    good(outputs=[{"name": "other"}]),
    good(outputs=[{"name": "score"}] * 2),
    good(outputs=[{"name": "score", "parameters": {"classification": 2}}]),
    good(parameters={"sequence_id": 4}),
    good(parameters={"timeout": -4}),
)


@pytest.mark.parametrize("told", NOT_TAKEN)
def test_a_request_that_the_model_does_not_take_is_refused(told: Any) -> None:
    for fine in TAKEN:
        arrays(PLAN, fine)
    with pytest.raises(BadRequestError):
        arrays(PLAN, told)


def test_named_axes_agree_and_keep_their_bounds() -> None:
    def told(ids: list[int], mask: list[int]) -> dict[str, Any]:
        return {
            "inputs": [
                tensor("ids", "INT64", ids, [1] * int(np.prod(ids))),
                tensor("mask", "BOOL", mask, [True] * int(np.prod(mask))),
            ]
        }

    assert arrays(TEXTS, told([2, 16], [2, 16]))["ids"].shape == (2, 16)
    for ids, mask in (([2, 17], [2, 17]), ([2, 5], [2, 6])):
        with pytest.raises(BadRequestError, match="tokens"):
            arrays(TEXTS, told(ids, mask))


def test_binary_faults_get_a_sentence() -> None:
    def told(first: int, second: int) -> dict[str, Any]:
        found = good()
        for one, size in zip(found["inputs"], (first, second), strict=True):
            del one["data"]
            one["parameters"] = {"binary_data_size": size}
        return found

    whole = bytes(20)
    assert arrays(PLAN, told(8, 12), whole)["numbers"].tolist() == [[0, 0, 0]]
    both = told(8, 12)
    both["inputs"][0]["data"] = [1, 2]
    infinite = bytes(8) + np.array([1, np.inf, 2], "<f4").tobytes()
    for body, binary in (
        (told(8, 12), whole[:-1]),
        (told(8, 12), whole + b"x"),
        (told(7, 12), whole[:-1]),
        (told(8, 12), None),
        (both, whole),
        (told(8, 12), infinite),
    ):
        with pytest.raises(BadRequestError):
            arrays(PLAN, body, binary)
    for header in (b"x", b"-1", b"1e3", b"99999", b"", b"9" * 30):
        with pytest.raises(BadRequestError, match="Inference-Header-Content-Length"):
            parse_request(b"{}", header)


@st.composite
def _sent(draw: st.DrawFn) -> tuple[str, Array]:
    name = draw(st.sampled_from(TYPES))
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=4))
    elements: Any = None
    if name == "float32":
        elements = st.floats(width=32, allow_infinity=False)
    return name, draw(hnp.arrays(np.dtype(name), shape, elements=elements))


@given(_sent(), st.booleans(), st.booleans())
def test_what_is_encoded_is_decoded_the_same(
    sent: tuple[str, Array], binary: bool, nested: bool
) -> None:
    dtype, array = sent
    plan = ModelPlan(signature_of(("x", dtype, ("batch", *array.shape[1:]))))
    one: dict[str, Any] = {
        "name": "x",
        "datatype": DATATYPE_OF[array.dtype],
        "shape": list(array.shape),
    }
    data = array.tolist() if nested else array.ravel().tolist()
    if binary:
        one["parameters"] = {"binary_data_size": array.nbytes}
        found = arrays(plan, {"inputs": [one]}, array.tobytes())["x"]
    else:
        text = json.dumps({"inputs": [{**one, "data": data}]}).replace("NaN", "null")
        found = arrays(plan, text.encode())["x"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@given(_sent(), st.booleans(), st.text(max_size=20))
def test_what_is_answered_can_be_read_by_any_json_reader(
    sent: tuple[str, Array], binary: bool, request_id: str
) -> None:
    _, array = sent
    try:
        request_id.encode()
    except UnicodeEncodeError:
        return
    head, body = encode_answer(Answer({"x": array}, SERVED), Wanted("x", binary), "r", request_id)
    length = re.search(rb"inference-header-content-length: (\d+)", head)
    assert (length is not None) == binary
    size = int(length[1]) if length else len(body)
    told = json.loads(body[:size])
    (output,) = told["outputs"]
    assert told.get("id", "") == request_id
    assert output["shape"] == list(array.shape)
    if binary:
        found = np.frombuffer(body[size:], NUMPY_OF[output["datatype"]])
    else:
        numbers = [np.nan if number is None else number for number in output["data"]]
        found = np.array(numbers, array.dtype)
    np.testing.assert_array_equal(found.reshape(array.shape), array)


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["codes", "numbers"]),
            "datatype": st.sampled_from([*NUMPY_OF, "BYTES", "BF16"]),
            "shape": st.lists(st.integers(-2, 2**65), max_size=4) | _JSON,
            "data": _JSON,
            "parameters": st.fixed_dictionaries(
                {}, optional={"binary_data_size": st.integers(0, 40) | _JSON}
            ),
        },
    ),
    st.binary(max_size=40),
    st.booleans(),
)
def test_a_wrong_tensor_is_never_a_fault_of_ours(
    fields: dict[str, Any], binary: bytes, has_binary: bool
) -> None:
    told = good()
    told["inputs"][0] |= fields
    for one in told["inputs"]:
        if "binary_data_size" in (one.get("parameters") or {}):
            one.pop("data", None)
    try:
        arrays(PLAN, told, binary if has_binary else None)
    except BadRequestError as exc:
        assert str(exc)  # noqa: PT017


@pytest.mark.parametrize("sent", [np.dtype(name) for name in ("<i8", "<u8", "<f8", "<i1", "<u4")])
@pytest.mark.parametrize("wanted", [np.dtype(name) for name in TYPES if name != "bool"])
def test_a_conversion_either_keeps_every_number_or_is_refused(
    sent: np.dtype[Any], wanted: np.dtype[Any]
) -> None:
    edges: list[int | float] = [0, 1, -1, 127, 255, 256, 2**24, 2**24 + 1, 2**31 - 1, 2**31]
    edges += [2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 0.5, 1e-46]
    for edge in edges:
        try:
            array = np.array([edge]).astype(sent)
        except (OverflowError, ValueError):
            continue
        try:
            converted = exact("x", array, wanted)
        except BadRequestError:
            continue
        assert converted[0].item() == array[0].item()
