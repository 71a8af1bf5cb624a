"""Stand-ins of the engine's own seam to the registry: versions whose answers tell who gave them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.config import EngineConfig, HardwareConfig, ServedModel
from serving.engine.engine import ModelEngine
from serving.engine.queues import Limits
from serving.engine.versions import Backend, Circuit, LoadedVersion, VersionKey
from serving.errors import NotReadyError, ServingError, UnknownModelError
from serving.interfaces import Answer, Array, Call, ServedBatch
from tasks.contracts.conversion import Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 2)),),
    output=TensorSpec(name="score", dtype="float32", shape=("batch",)),
    largest={"batch": 1000},
)
SEQUENCES = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", "seq")),),
    output=TensorSpec(name="sums", dtype="float32", shape=("batch", 2)),
    largest={"batch": 64, "seq": 9},
)
PROBE = -7.0
POISON = 666.0


class Behaviour:
    """How a backend behaves: changed by tests while it serves."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.broken = False
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()


def score(number: int, behaviour: Behaviour, signature: Signature) -> Callable[..., Array]:
    """The sum of each row plus a thousand times the version's number."""

    def run(arrays: dict[str, Array]) -> Array:
        x = arrays["x"]
        if behaviour.broken:
            raise RuntimeError("the device is gone")
        if (x == POISON).any():
            raise RuntimeError("index out of bounds")
        if not (x == PROBE).all():
            behaviour.sizes.append(len(x))
        behaviour.gate.wait(20)
        if behaviour.seconds:
            time.sleep(behaviour.seconds)
        sums = x.sum(axis=1) + np.float32(1000 * number)
        return np.stack([sums, -sums], axis=1) if signature is SEQUENCES else sums

    return run


@dataclass
class Shelf:
    """A catalogue of made versions."""

    hardware: tuple[str, ...] = ("cpu",)
    signatures: dict[str, Signature] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=lambda: {"champion": "1"})
    bad: dict[str, Exception] = field(default_factory=dict)
    most: int = 9
    digest: str = "a"
    seconds: float = 0.0
    opened: list[str] = field(default_factory=list)
    behaviours: dict[tuple[str, str], Behaviour] = field(default_factory=dict)
    away: bool = False

    def by_alias(self, model: str, alias: str) -> VersionKey | None:
        if self.away:
            raise NotReadyError("the registry is away")
        number = self.aliases.get(alias)
        return None if number is None else VersionKey(model, number, self.digest)

    def by_number(self, model: str, version: str) -> VersionKey:
        if not version.isdigit() or not 0 < int(version) <= self.most:
            raise UnknownModelError(f"there is no version {version}")
        return VersionKey(model, version, self.digest)

    def open(self, key: VersionKey) -> LoadedVersion:
        self.opened.append(key.version)
        if key.version in self.bad:
            raise self.bad[key.version]
        signature = self.signatures.get(key.version, SIGNATURE)
        backends = tuple(self.backend(name, key, signature) for name in self.hardware)
        return LoadedVersion(key, signature, backends)

    def backend(self, hardware: str, key: VersionKey, signature: Signature) -> Backend:
        behaviour = Behaviour(self.seconds)
        self.behaviours[key.version, hardware] = behaviour
        made = Backend(
            hardware=hardware,
            variant=f"{hardware}-fp32",
            platform="onnxruntime_onnx",
            score=score(int(key.version), behaviour, signature),
            probe={"x": np.full((1, 2), PROBE, np.float32)},
            circuit=Circuit(0.02, 0.2),
        )
        made.times.note(2, max(behaviour.seconds * 1e3, 0.01))
        return made

    def has_changed(self) -> bool:
        return True


@dataclass
class Desk:
    """Submits calls to an engine and keeps what became of them."""

    engine: ModelEngine
    shelf: Shelf
    outcomes: dict[str, list[Answer | ServingError]] = field(default_factory=dict)
    asked: int = 0

    def ask(self, value: float = 1.0, rows: int = 1, **changes: object) -> Call:
        call = made_call(f"r{self.asked}", value, rows, **changes)
        self.asked += 1
        self.engine.submit(call, self._done)
        return call

    def _done(self, call: Call, outcome: Answer | ServingError) -> None:
        self.outcomes.setdefault(call.request_id, []).append(outcome)

    def answer(self, call: Call) -> Answer:
        (found,) = self.outcomes[call.request_id]
        assert isinstance(found, Answer), found
        return found

    def error(self, call: Call) -> ServingError:
        (found,) = self.outcomes[call.request_id]
        assert isinstance(found, ServingError), found
        return found

    async def settled(self, limit_s: float = 20.0) -> None:
        """Wait until every call has an outcome."""
        await until(lambda: len(self.outcomes) == self.asked, limit_s)

    def let_go(self) -> None:
        """All backends give back what they compute."""
        for behaviour in self.shelf.behaviours.values():
            behaviour.gate.set()

    async def finish(self) -> None:
        self.let_go()
        await self.settled()


@dataclass
class Witness:
    """An observer that keeps everything."""

    batches: list[ServedBatch] = field(default_factory=list)
    refusals: list[tuple[Call, ServingError]] = field(default_factory=list)

    def served(self, batch: ServedBatch) -> None:
        self.batches.append(batch)

    def refused(self, call: Call, error: ServingError) -> None:
        self.refusals.append((call, error))


def made_call(request_id: str, value: float, rows: int, **changes: object) -> Call:
    inputs: Mapping[str, Array] = {"x": np.full((rows, 2), value, np.float32)}
    told: dict[str, object] = {"inputs": inputs, **changes}
    return Call(model="m", num_rows=rows, request_id=request_id, **told)  # type: ignore[arg-type]


def version_of(answer: Answer, name: str = "score") -> str:
    """The version that computed an answer, by its numbers."""
    return str(int(answer.outputs[name].flat[0] // 1000))


TWO_KINDS = (HardwareConfig(name="cpu"), HardwareConfig(name="gpu"))


def engine_of(
    shelf: Shelf, models: Sequence[ServedModel] = (ServedModel(name="m"),), **changes: Any
) -> ModelEngine:
    """An engine that looks often; `changes` are of its configuration or its limits."""
    names = EngineConfig.model_fields.keys()
    config = EngineConfig(**{n: v for n, v in changes.items() if n in names})
    limits = {n: v for n, v in changes.items() if n not in names}
    often = {"poll_s": 0.02, "retry_s": 0.02, "most_retry_s": 0.1}
    return ModelEngine(config, models, shelf, limits=Limits(**{**often, **limits}))


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be in time"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    shelf: Shelf, witness: Witness | None = None, **changes: Any
) -> AsyncIterator[Desk]:
    """An engine of `engine_of`, from its start to its end."""
    engine = engine_of(shelf, **changes)
    engine.observers.extend([witness] if witness else [])
    await engine.start()
    desk = Desk(engine, shelf)
    try:
        yield desk
    finally:
        desk.let_go()
        await engine.stop()


async def held(desk: Desk, number: str = "1", **changes: object) -> Behaviour:
    """A version's backend, once it computes a call that it does not give back yet."""
    behaviour = desk.shelf.behaviours[number, "cpu"]
    behaviour.gate.clear()
    desk.ask(**changes)  # type: ignore[arg-type]
    await until(lambda: behaviour.sizes == [1])
    return behaviour


async def asked(desk: Desk, **changes: object) -> Any:
    call = desk.ask(**changes)  # type: ignore[arg-type]
    await desk.settled()
    return call
