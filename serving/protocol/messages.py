"""Requests of the Open Inference Protocol as they lie in JSON, and how they are read.

What a server and its models say of themselves, for both protocols.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from serving.errors import BadRequestError, UnknownModelError
from serving.interfaces import TRACKS, VersionState
from serving.protocol.tensors import DATATYPE_OF, Sent, refused
from tasks.contracts.conversion import TensorSpec

if TYPE_CHECKING:
    from serving.engine.engine import ModelEngine

SEQUENCE_REFUSED = (
    "the request has the parameter sequence_id; models here keep no state between requests"
)
NO_DATA = msgspec.Raw(b"")
Microseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class InputParameters(msgspec.Struct):
    """What may be said of one input."""

    binary_data_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    shared_memory_region: Any = None


class InputTensor(msgspec.Struct):
    """One input; `data` is read later, by its datatype."""

    name: str
    datatype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=8)]
    data: msgspec.Raw = msgspec.field(default_factory=lambda: NO_DATA)
    parameters: InputParameters | None = None


class OutputParameters(msgspec.Struct):
    """What may be said of one wanted output."""

    binary_data: bool | None = None
    classification: Any = None
    shared_memory_region: Any = None


class WantedOutput(msgspec.Struct):
    """One output that is asked for."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(msgspec.Struct):
    """What may be said of a request. Anything else that stands here is not looked at."""

    timeout: Microseconds | None = None
    binary_data_output: bool = False
    sequence_id: Any = None


class InferRequest(msgspec.Struct):
    """A request for answers."""

    inputs: list[InputTensor]
    outputs: list[WantedOutput] | None = None
    id: str = ""
    parameters: RequestParameters | None = None

    @property
    def timeout_s(self) -> float | None:
        """Time that the client gives, from its parameter in microseconds."""
        if self.parameters is None or self.parameters.timeout is None:
            return None
        return self.parameters.timeout / 1e6


_REQUEST = msgspec.json.Decoder(InferRequest)


def parse_request(body: bytes, json_bytes: bytes | None) -> tuple[InferRequest, memoryview | None]:
    """Take a body apart into its JSON and the binary data behind it.

    Args:
        body: as received.
        json_bytes: value of `Inference-Header-Content-Length`; None where all is JSON.

    Raises:
        BadRequestError: it is no request of the protocol, or asks for what is not offered.
    """
    binary = None
    if json_bytes is not None:
        if not json_bytes.isdigit() or len(json_bytes) > 18 or int(json_bytes) > len(body):
            raise BadRequestError(
                f"Inference-Header-Content-Length is {json_bytes.decode('latin-1')[:40]!r}; "
                f"expected how many of the body's {len(body)} bytes are JSON"
            )
        body, binary = body[: int(json_bytes)], memoryview(body)[int(json_bytes) :]
    try:
        request = _REQUEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"the request is not one of the inference protocol: {exc}") from exc
    except RecursionError as exc:
        raise BadRequestError("the request's JSON is nested too deep") from exc
    if request.parameters is not None and request.parameters.sequence_id is not None:
        raise BadRequestError(SEQUENCE_REFUSED)
    return request, binary


def sent_inputs(request: InferRequest, binary: memoryview | None) -> Iterator[Sent]:
    """Inputs of a request, with their data.

    Raises:
        BadRequestError: one has no data, or some that is not to be read, or binary data is left.
    """
    at = 0
    for tensor in request.inputs:
        parameters = tensor.parameters
        size = None if parameters is None else parameters.binary_data_size
        if parameters is not None and parameters.shared_memory_region is not None:
            raise refused(tensor.name, "lies in shared memory, which this server does not read")
        if (size is None) == (tensor.data is NO_DATA):
            raise refused(tensor.name, "needs either `data` or the parameter binary_data_size")
        if size is None:
            yield Sent(tensor.name, tensor.datatype, tensor.shape, tensor.data)
            continue
        if binary is None:
            raise refused(tensor.name, "is binary, but Inference-Header-Content-Length is absent")
        if at + size > len(binary):
            raise refused(
                tensor.name, f"has {size} bytes of binary data; {len(binary) - at} are left"
            )
        yield Sent(tensor.name, tensor.datatype, tensor.shape, None, binary[at : at + size])
        at += size
    if binary is not None and at != len(binary):
        raise BadRequestError(f"{len(binary) - at} bytes of binary data belong to no input")


EXTENSIONS = ("binary_tensor_data", "model_repository")


def server_metadata(extensions: Sequence[str] = EXTENSIONS) -> dict[str, Any]:
    """Name, version and extensions of the server."""
    try:
        number = version("falaj")
    except PackageNotFoundError:  # run from a checkout that is not installed
        number = "0"
    return {"name": "falaj", "version": number, "extensions": list(extensions)}


def model_metadata(engine: ModelEngine, model: str, version: str | None = None) -> dict[str, Any]:
    """Versions, platform and tensors of a model; names of classes as a property, JSON.

    Raises:
        UnknownModelError: there is no such model or version.
        NotReadyError: it cannot answer now.
    """
    signature = engine.signature(model, version)
    states = [state for state in engine.states() if state.name == model]
    classes = signature.output.columns
    properties = {"classes": msgspec.json.encode(classes).decode()}
    return {
        "name": model,
        "versions": [state.version for state in states if state.state == "READY"],
        "platform": _platform(states, version),
        "inputs": [tensor_metadata(spec) for spec in signature.inputs],
        "outputs": [tensor_metadata(signature.output)],
        **({"properties": properties} if classes else {}),
    }


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """Name, datatype and shape of a tensor; an axis of any length is -1."""
    shape = [length if isinstance(length, int) else -1 for length in spec.shape]
    return {"name": spec.name, "datatype": DATATYPE_OF[np.dtype(spec.dtype)], "shape": shape}


def repository_index(engine: ModelEngine, only_ready: bool) -> list[dict[str, str]]:
    """All versions of all models, and what is with them."""
    return [
        {"name": s.name, "version": s.version, "state": s.state, "reason": s.reason}
        for s in engine.states()
        if s.state == "READY" or not only_ready
    ]


def known_states(engine: ModelEngine, model: str, version: str | None = None) -> list[VersionState]:
    """States of a model of which, and of whose version, something is known.

    Raises:
        UnknownModelError: nothing is.
    """
    states = [state for state in engine.states() if state.name == model]
    if not states:
        raise UnknownModelError(f"there is no model {model!r} here")
    if version is not None and version not in (state.version for state in states):
        there = ", ".join(state.version for state in states)
        raise UnknownModelError(f"model {model!r} has no version {version!r} here; it has {there}")
    return states


def admin_state(engine: ModelEngine, model: str) -> dict[str, Any]:
    """Tracks and versions of a model, for the admin interface.

    Raises:
        UnknownModelError: there is no such model.
    """
    states = known_states(engine, model)
    slots = {t: next((s.version for s in states if t in s.tracks), None) for t in TRACKS}
    versions = [version_state(state) for state in states]
    return {"name": model, "ready": engine.is_ready(model), "slots": slots, "versions": versions}


def version_state(state: VersionState) -> dict[str, Any]:
    """A version's state as plain data, without the model's name; clients read `slots`."""
    found = asdict(state)
    return {"slots" if name == "tracks" else name: found[name] for name in found if name != "name"}


def _platform(states: Sequence[VersionState], version: str | None) -> str:
    def fits(state: VersionState) -> bool:
        return state.version == version if version is not None else "stable" in state.tracks

    return next((state.platform for state in states if fits(state)), "")
