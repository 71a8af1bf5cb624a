"""From a received request to a call of the engine, for both protocols; no sockets here."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from serving import errors
from serving.config import ServingConfig
from serving.interfaces import (
    TRACKS,
    Answer,
    Call,
    Done,
    Guard,
    Headers,
    Observer,
    Track,
    num_rows_of,
    settle,
)
from serving.protocol.answers import known_error
from serving.protocol.messages import InferRequest, parse_request, sent_inputs
from serving.protocol.plans import ModelPlan, Wanted
from serving.protocol.tensors import Sent, read_columns

if TYPE_CHECKING:
    from serving.engine.engine import ModelEngine
    from serving.features.reader import FeastEntityReader

_INFER = re.compile(r"/v2/models/([^/]{1,300})(?:/versions/([^/]{1,300}))?/infer")
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_KNOWN = 1024
now = time.monotonic
"""The clock of `Call.arrived` and `Call.deadline`."""


@lru_cache(_MOST_KNOWN)
def infer_target(target: bytes) -> tuple[str, str | None] | None:
    """Model and version of an infer request's path and query; None for any other."""
    match = _INFER.fullmatch(target.partition(b"?")[0].decode("latin-1"))
    return match and (unquote(match[1]), unquote(match[2]) if match[2] else None)


class RequestIds:
    """Names for requests that came without one: unlike those of any other process."""

    def __init__(self) -> None:
        prefix = secrets.token_hex(8)
        self._made = (f"{prefix}-{number:x}" for number in count(1))

    def accepted(self, sent: bytes | None) -> str:
        """What was sent, if it is sane, else a new one."""
        text = (sent or b"").decode("latin-1")
        return text if _SANE_ID.fullmatch(text) else next(self._made)


@dataclass(eq=False)
class Front:
    """All that the listeners of a process know of what is behind them.

    Attributes:
        stopping: set when the process is to end; it is not ready from then on.
        buffered: bytes of bodies being received, on all connections.
    """

    engine: ModelEngine
    guard: Guard
    config: ServingConfig
    observers: Sequence[Observer] = ()
    entities: FeastEntityReader | None = None
    ids: RequestIds = field(default_factory=RequestIds)
    stopping: bool = False
    buffered: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _plans: dict[tuple[str, str | None, Track], ModelPlan] = field(default_factory=dict)

    def is_ready(self, *names: str | None) -> bool:
        """Whether all models answer, or one, or a version of it; none once the process ends."""
        return not self.stopping and self.engine.is_ready(*names)

    def plan(self, call: Call) -> ModelPlan:
        """How requests to the model of a call are read now.

        Raises:
            UnknownModelError, NotReadyError: as `ModelEngine.signature`.
        """
        key = (call.model, call.version, call.track)
        signature = self.engine.signature(*key)
        plan = self._plans.get(key)
        if plan is None or plan.signature is not signature:
            if len(self._plans) >= _MOST_KNOWN:
                self._plans.clear()
            plan = self._plans[key] = ModelPlan(signature)
        return plan

    def read(self, call: Call, headers: Mapping[bytes, bytes], body: bytes) -> tuple[Wanted, str]:
        """Fill a call with what an infer request asks for; `entities` where it names keys.

        Returns:
            how its output is sent, and the client's own name of the request.

        Raises:
            ServingError: it is not one that the model takes.
        """
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise errors.UnsupportedBodyError("the body is compressed; send it as it is")
        self.begin(call, headers)
        request, binary = parse_request(body, headers.get(b"inference-header-content-length"))
        call.deadline = call.arrived + self._time_of(headers.get(b"x-falaj-timeout-ms"), request)
        plan = self.plan(call)
        names = [tensor.name for tensor in request.inputs]
        self.fill(call, plan, names, sent_inputs(request, binary))
        return plan.wanted(request), request.id

    def begin(self, call: Call, headers: Mapping[bytes, bytes]) -> None:
        """Note track and trace, and refuse what would wait too long before any of it is read.

        Raises:
            ServingError: there is no such track, or as `ModelEngine.refusal` says.
        """
        call.track = self._track(headers.get(b"x-falaj-slot"))
        refusal = self.engine.refusal(call.model, call.version, call.track)
        if refusal is not None:
            raise refusal
        trace = headers.get(b"traceparent")
        if trace is not None and _TRACEPARENT.fullmatch(trace):
            call.trace = trace.decode()

    def fill(
        self, call: Call, plan: ModelPlan, names: Sequence[str], inputs: Iterable[Sent]
    ) -> None:
        """Read a request's inputs into its call, or its columns of keys.

        Raises:
            BadRequestError: they are not what the model takes.
        """
        if self._names_entities(call.model, plan, names):
            call.entities = read_columns(inputs)
        else:
            call.inputs, call.num_rows = plan.arrays(inputs)

    def _names_entities(self, model: str, plan: ModelPlan, names: Sequence[str]) -> bool:
        """Whether inputs of these names are key columns, and what else a request by keys gives.

        The reader is asked only where a name is no input of the model: its troubles are not
        those of a request that brings its inputs.
        """
        if self.entities is None or not names or names[0] in plan.inputs:
            return False
        keys = self.entities.keys_of(model)
        return keys is not None and not keys.isdisjoint(names)

    async def resolve(self, call: Call) -> None:
        """Read the features of a call that names entities, and make them its inputs.

        Raises:
            ServingError: as `FeastEntityReader.resolve`, or the model changed meanwhile.
        """
        assert self.entities is not None
        assert call.entities is not None
        asked = call.model, call.version, call.track
        signature = self.engine.signature(*asked)
        time_left = None if call.deadline is None else call.deadline - now()
        try:
            async with asyncio.timeout(time_left):
                inputs, call.features = await self.entities.resolve(
                    call.model, call.entities, call.version, call.track
                )
        except TimeoutError as exc:
            raise errors.DeadlineError("time was over before the features were read") from exc
        if self.engine.signature(*asked) != signature:
            changed = f"{call.model} was changed while the features were read; send it again"
            raise errors.NotReadyError(changed, 1.0)
        call.inputs = inputs
        call.num_rows = num_rows_of(inputs)

    def parameters_of(self, call: Call) -> Mapping[str, Any] | None:
        """What the answer says of the features that were read; None where none were."""
        return None if call.features is None else {"features": call.features.report()}

    async def computed(self, call: Call) -> Answer:
        """The engine's answer.

        Raises:
            ServingError: the engine refused the call or failed on it.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.engine.submit(call, lambda _, outcome: settle(future, outcome))
        return await future

    def admit(
        self, call: Call, headers: Headers, found: Mapping[bytes, bytes], address: str
    ) -> None:
        """Let a call's client ask its model, and note the call's track.

        Raises:
            ServingError: as `Guard.admit`.
        """
        call.track = self.track_meant(found)
        call.subject = self.guard.admit(headers, address, "infer", call.model).subject

    def submit(self, call: Call, done: Done) -> None:
        """Give a call to the engine, once the features of its entities are read."""
        if call.entities is None:
            self.engine.submit(call, done)
        else:
            self.start(self._resolve_and_submit(call, done))

    async def _resolve_and_submit(self, call: Call, done: Done) -> None:
        try:
            await self.resolve(call)
            self.engine.submit(call, done)
        except Exception as error:
            known = known_error(error)
            self.report_refused(call, known)
            done(call, known)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what a connection waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def report_refused(self, call: Call, error: errors.ServingError) -> None:
        """Give observers a call that never reached the engine."""
        for observer in self.observers:
            observer.refused(call, error)

    def track_meant(self, headers: Mapping[bytes, bytes]) -> Track:
        """The track that a request is for; `stable` also where it names one that is none.

        Releases judge versions by what was refused too, so a refusal belongs to its track.
        """
        try:
            return self._track(headers.get(b"x-falaj-slot"))
        except errors.BadRequestError:
            return "stable"

    def _track(self, sent: bytes | None) -> Track:
        if sent is None or not self.config.http.track_header:
            return "stable"
        text = sent.decode("latin-1")
        for track in TRACKS:
            if text == track:
                return track
        tracks = ", ".join(TRACKS)
        raise errors.BadRequestError(f"x-falaj-slot is {text[:40]!r}; expected one of {tracks}")

    def _time_of(self, header: bytes | None, request: InferRequest) -> float:
        """Seconds that a request gets."""
        most = self.config.timeout_s
        if header is None:
            return capped(request.timeout_s, most)
        if not header.isdigit() or len(header) > 12:
            raise errors.BadRequestError(
                f"x-falaj-timeout-ms is {header[:40].decode('latin-1')!r}; expected milliseconds"
            )
        return capped(int(header) / 1e3, most)


def capped(asked_s: float | None, most_s: float) -> float:
    """Time that a request gets; 0 and None leave it to the server."""
    return min(asked_s, most_s) if asked_s else most_s
