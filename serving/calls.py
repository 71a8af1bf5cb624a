"""What travels in a serving process: a call, its answer, and the batch that both were part of."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Slot = Literal["stable", "candidate", "shadow"]
SLOTS: tuple[Slot, ...] = ("stable", "candidate", "shadow")
SLOT_HEADER = "x-falaj-slot"
"""Request header that says which slot answers; the edge sets it and removes what clients send."""
GRPC_MODEL_HEADER = "falaj-model"
"""Metadata by which a gRPC client says its model again, for those who do not read messages."""
REQUEST_ID_HEADER = "x-request-id"
SERVED_HEADERS = ("x-falaj-model", "x-falaj-version", "x-falaj-variant", "x-falaj-slot",
                  "x-falaj-hardware", "x-falaj-fell-over")  # fmt: skip
"""Response headers that say what answered, `x-falaj-fell-over` only where it was not the first."""


@dataclass(slots=True)
class Call:
    """One request for a model's answers, its inputs checked against the model's signature.

    Attributes:
        model: name in the registry.
        inputs: arrays of the signature's names and types, rows first.
        num_rows: rows of every input.
        request_id: as the client or the edge named it, else made here.
        version: that the client asked for; None leaves it to the slot.
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
    slot: Slot = "stable"
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
    slot: Slot
    hardware: str
    """Hardware class, as `cpu`."""
    fell_over_from: str = ""
    """Backend that failed or was full before; empty where the first one answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs of one call: rows `start` to `start + num_rows` of its batch."""

    outputs: Mapping[str, Array]
    """By name, rows of this call alone."""
    served: Served


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """Calls that were computed together, told to observers after their answers are sent.

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
