"""The seams of a serving process: what protocols, engine, observers and guards know of each other.

    protocol (HTTP, gRPC) --Call--> Engine --Answer--> protocol
                 |                    '--ServedBatch--> observers (log, metrics, traces)
                 '--credentials--> Guard --Principal-->

Everything here is called on the event loop's thread and must not wait, coroutines excepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from serving.calls import Answer, Call, ServedBatch, Slot
from serving.errors import ServingError
from tasks.contracts.conversion import Signature

Done = Callable[[Call, Answer | ServingError], None]
"""Takes the outcome of a call: once for each call, later than its submission, on the loop."""
Headers = Sequence[tuple[bytes, bytes]]
"""As ASGI gives them: names in small letters."""
Action = Literal["infer", "read", "admin"]
"""What is asked for: answers; health and metadata; loading, slots, metrics and status."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version of a model in this process.

    Attributes:
        state: `READY`, `LOADING` or `UNAVAILABLE`.
        reason: why it is not ready; empty where it is.
        slots: that it answers.
    """

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""
    slots: tuple[Slot, ...] = ()
    variant: str = ""
    hardware: str = ""
    platform: str = ""
    """As the protocol names a backend: `onnxruntime_onnx`, `openvino_ir`, `pytorch_program`."""


class Engine(Protocol):
    """Loaded models behind bounded queues."""

    def submit(self, call: Call, done: Done) -> None:
        """Queue a call; whatever happens, `done` is called once, in a later turn of the loop."""

    def refusal(
        self, model: str, version: str | None = None, slot: Slot = "stable"
    ) -> ServingError | None:
        """Why a call would be refused, asked before it is read; None where it is to be read.

        The engine counts it. Whoever asks tells the client and the observers.
        """

    def signature(self, model: str, version: str | None = None, slot: Slot = "stable") -> Signature:
        """What a model takes.

        Raises:
            UnknownModelError: there is no such model or version.
            NotReadyError: it is known and cannot answer now.
        """

    def states(self) -> Sequence[VersionState]:
        """All versions of all models, ready or not."""

    def is_ready(self, model: str | None = None, version: str | None = None) -> bool:
        """Whether a model's stable slot, or this version, answers; None asks for all models."""

    async def load(self, model: str, version: str | None = None) -> VersionState:
        """Load what the registry's alias names, or a version, check it and make it ready.

        Raises:
            UnknownModelError: the registry has no such version.
            NotReadyError: its files, its stamp or its golden batch are not as recorded; what
                served before goes on.
        """

    async def unload(self, model: str, version: str | None = None) -> None:
        """Take a version, or a whole model, out of service after its last call."""

    async def set_slots(self, model: str, slots: Mapping[Slot, str | None]) -> None:
        """Say which version each slot means, all at once; None empties a slot.

        A version is loaded and checked first. The one that leaves `stable` stays warm.

        Raises:
            UnknownModelError, NotReadyError: as `load`; no slot was changed.
        """


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
        return any(
            action in self.roles.get(name, frozenset())
            for name in (("*",) if model is None else (model, "*"))
        )


class Guard(Protocol):
    """Knows clients by what they present, and what each may do how often."""

    def recognise(self, headers: Headers, address: str) -> None:
        """See that somebody asks whom this server knows, before what they ask has arrived.

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


class EntityReader(Protocol):
    """Turns requests that name entities into model inputs, from the online store."""

    def keys_of(self, model: str) -> frozenset[str] | None:
        """Names of the key columns of a model's feature service; None where it has none here."""

    async def resolve(
        self,
        model: str,
        entities: Mapping[str, Sequence[Any]],
        signature: Signature,
        version: str | None = None,
        slot: Slot = "stable",
    ) -> tuple[Mapping[str, Any], Any]:
        """Inputs for these entities, and what was read for them (goes to `Call.features`).

        `version` and `slot` say which version will answer, as in `Call`.

        Raises:
            BadRequestError: a key is absent or impossible.
            FeaturesRefusedError: features are missing or stale, and the policy is to refuse.
            NotReadyError: the online store is away.
        """

    def report(self, features: Any) -> Mapping[str, Any]:
        """What was read, for the answer: values, view versions, ages, states. JSON-ready."""


Pages = Mapping[str, Callable[[], tuple[str, bytes]]]
"""Extra pages of the admin interface: path -> function giving content type and body."""
