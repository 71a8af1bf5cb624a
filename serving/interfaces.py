"""The seams of a serving process: what protocols, engine, observers and guards know of each other.

    protocol (HTTP, gRPC) --Call--> ModelEngine --Answer--> protocol
                 |                    '--ServedBatch--> observers (log, metrics, traces)
                 '--credentials--> Guard --Principal-->

Everything here is called on the event loop's thread and must not wait, coroutines excepted.

What travels in a serving process: a call, its answer, and the batch that both were part of.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.errors import ServingError

Array = NDArray[Any]
Track = Literal["stable", "candidate", "shadow"]
TRACKS: tuple[Track, ...] = ("stable", "candidate", "shadow")
GRPC_MODEL_HEADER = "falaj-model"
"""Metadata by which a gRPC client says its model again, for those who do not read messages."""
SERVED_HEADERS = ("x-falaj-model", "x-falaj-version", "x-falaj-variant", "x-falaj-slot",
                  "x-falaj-hardware", "x-falaj-fell-over")  # fmt: skip
"""Response headers that say what answered, `x-falaj-fell-over` only where it was not the first."""
SECURITY_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Of every answer."""


@dataclass(slots=True)
class Call:
    """One request for a model's answers, its inputs checked against the model's signature.

    Attributes:
        model: name in the registry.
        inputs: arrays of the signature's names and types, rows first.
        num_rows: rows of every input.
        request_id: as the client or the edge named it, else made here.
        version: that the client asked for; None leaves it to the track.
        subject: who asks; empty where nobody has to say.
        deadline: on `time.monotonic()`, after which nobody waits; None for none.
        is_gone: set by the protocol when the client has closed its connection.
        entities: key columns of a request that named entities instead of inputs.
        features: what was read for them, as `serving.features` reports it.
        trace: W3C `traceparent` of the caller; empty for none.
    """

    model: str
    inputs: Mapping[str, Array]
    num_rows: int
    request_id: str
    version: str | None = None
    track: Track = "stable"
    subject: str = ""
    deadline: float | None = None
    is_gone: bool = False
    arrived: float = field(default_factory=time.monotonic)
    entities: Mapping[str, Sequence[Any]] | None = None
    features: Any = None
    trace: str = ""

    def is_over(self, now: float) -> bool:
        """Whether nobody waits for its answer any more."""
        return self.is_gone or (self.deadline is not None and self.deadline <= now)


@dataclass(frozen=True, slots=True)
class Served:
    """What answered a batch."""

    model: str
    version: str
    variant: str
    track: Track
    hardware: str
    """Hardware class, as `cpu`."""
    fell_over_from: str = ""
    """Hardware that is preferred and has failed; empty where the first one answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs of one call: rows `start` to `start + num_rows` of its batch."""

    outputs: Mapping[str, Array]
    """By name, rows of this call alone."""
    served: Served


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """Calls that were computed together, shown to observers after their answers are sent.

    Attributes:
        calls: in the order of their rows.
        inputs: all rows together; not to be changed.
        outputs: likewise.
        started: `time.monotonic()` before the model ran; `finished` after.
        finished_at: seconds since 1970 of `finished`.
    """

    calls: tuple[Call, ...]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    served: Served
    started: float
    finished: float
    finished_at: float


def num_rows_of(arrays: Mapping[str, Array]) -> int:
    """Rows of arrays that all have the same number of them."""
    return int(np.shape(next(iter(arrays.values())))[0])


def settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a future what came of its work, unless nobody waits any more."""
    if future.done():
        return
    if isinstance(outcome, ServingError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


Done = Callable[[Call, Answer | ServingError], None]
"""Takes the outcome of a call: once for each call, later than its submission, on the loop."""
Headers = Sequence[tuple[bytes, bytes]]
"""As ASGI gives them: names in small letters."""
Action = Literal["infer", "read", "admin"]
"""What is asked for: answers; health and metadata; loading, tracks, metrics and status."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version of a model in this process.

    Attributes:
        state: `READY`, `LOADING` or `UNAVAILABLE`.
        reason: why it is not ready; empty where it is.
        tracks: that it answers.
    """

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""
    tracks: tuple[Track, ...] = ()
    variant: str = ""
    hardware: str = ""
    platform: str = ""
    """As the protocol names a backend, such as `onnxruntime_onnx` or `openvino_ir`."""


class Observer(Protocol):
    """Sees what was served; must neither wait nor raise, and counts what it drops."""

    def served(self, batch: ServedBatch) -> None:
        """A batch was computed and its answers were handed over."""

    def refused(self, call: Call, error: ServingError) -> None:
        """A call was not answered."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, once known.

    Attributes:
        subject: name for logs and limits.
        tenant: that the subject belongs to; empty for none.
        roles: `model name -> actions`; the name `*` stands for every model.
        expires: `time.time()` after which it has to be asked for again.
    """

    subject: str
    tenant: str
    roles: Mapping[str, frozenset[str]]
    expires: float

    def may(self, action: Action, model: str | None) -> bool:
        """Whether the roles allow an action, on a model or, with None, on the server."""
        names = ("*",) if model is None else (model, "*")
        return any(action in self.roles.get(name, frozenset()) for name in names)


class Guard(Protocol):
    """Knows clients by what they present, and what each may do how often."""

    def recognise(self, headers: Headers, address: str) -> Principal:
        """Who asks, whom this server knows, before what they ask has arrived.

        Raises:
            UnauthorizedError: nothing, or nothing valid, was presented.
            TooManyRequestsError: too much that is not valid came from this address.
        """

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        """Who asks, if that is allowed now.

        Raises:
            UnauthorizedError: nothing, or nothing valid, was presented.
            ForbiddenError: the role does not allow it.
            TooManyRequestsError: more often than allowed; says when to come again.
        """


Pages = Mapping[str, Callable[[], tuple[str, bytes]]]
"""Extra pages of the admin interface: path -> function giving content type and body."""
