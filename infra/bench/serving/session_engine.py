"""A serving process around one ONNX session, to measure the protocol in front of it.

    python -m infra.bench.serving.session_engine MODEL_FILE STATE_FOLDER

What came in during a turn of the loop is computed together, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import uvloop

from infra.bench.serving.tabular_program import SIGNATURE
from serving.assembly import Parts, ServingProcess
from serving.calls import Answer, Call, Served, ServedBatch, Slot
from serving.config import ServingConfig, checked_config
from serving.errors import NotReadyError, ServingError, UnknownModelError
from serving.interfaces import Done, Observer, VersionState
from tasks.contracts.conversion import Signature

MODEL = "tabular"
_VERSION = "1"
_MOST_TOGETHER = 256


class Counting:
    """An observer that keeps what metrics and a log keep of a batch before they write it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.seconds = 0.0
        self.last: ServedBatch | None = None

    def served(self, batch: ServedBatch) -> None:
        """Count latencies, keep the batch."""
        self.num_calls += len(batch.calls)
        self.seconds += sum([batch.finished - call.arrived for call in batch.calls])
        self.last = batch

    def refused(self, call: Call, error: ServingError) -> None:
        """Count nothing: a bench is not refused."""


def open_session(file: Path) -> onnxruntime.InferenceSession:
    """A session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


class SessionEngine:
    """One model in one version; see `serving.interfaces.Engine`."""

    def __init__(
        self, session: onnxruntime.InferenceSession, observers: Sequence[Observer]
    ) -> None:
        self._session = session
        self._observers = observers
        self._served = Served(MODEL, _VERSION, "onnx-fp32", "stable", "cpu")
        self._queue: list[tuple[Call, Done]] = []

    def submit(self, call: Call, done: Done) -> None:
        """Queue a call for the next turn of the loop."""
        self._queue.append((call, done))
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        queue, self._queue = self._queue, []
        for start in range(0, len(queue), _MOST_TOGETHER):
            self._compute(queue[start : start + _MOST_TOGETHER])

    def _compute(self, queue: Sequence[tuple[Call, Done]]) -> None:
        calls = tuple([call for call, _ in queue])
        inputs = calls[0].inputs
        if len(calls) > 1:
            inputs = {name: np.concatenate([c.inputs[name] for c in calls]) for name in inputs}
        started = time.monotonic()
        (score,) = self._session.run(None, inputs)
        finished = time.monotonic()
        at = 0
        for call, done in queue:
            done(call, Answer({"score": score[at : at + call.num_rows]}, self._served))
            at += call.num_rows
        outputs = {"score": score}
        batch = ServedBatch(calls, inputs, outputs, self._served, started, finished, time.time())
        for observer in self._observers:
            observer.served(batch)

    def refusal(
        self, model: str, version: str | None = None, slot: Slot = "stable"
    ) -> ServingError | None:
        """See `Engine.refusal`: everything is read."""
        return None

    def signature(self, model: str, version: str | None = None, slot: Slot = "stable") -> Signature:
        """See `Engine.signature`."""
        if model != MODEL:
            raise UnknownModelError(f"there is no model {model!r} here")
        return SIGNATURE

    def states(self) -> Sequence[VersionState]:
        """See `Engine.states`."""
        return [VersionState(MODEL, _VERSION, "READY", slots=("stable",))]

    def is_ready(self, model: str | None = None, version: str | None = None) -> bool:
        """See `Engine.is_ready`."""
        return True

    async def load(self, model: str, version: str | None = None) -> VersionState:
        """Refuse: there is nothing else to load."""
        raise NotReadyError("a bench loads nothing")

    async def unload(self, model: str, version: str | None = None) -> None:
        """Refuse: the bench ends with its model."""
        raise NotReadyError("a bench unloads nothing")

    async def set_slots(self, model: str, slots: Mapping[Slot, str | None]) -> None:
        """Refuse: there is one version."""
        raise NotReadyError("a bench has one slot")


def main(arguments: list[str]) -> int:
    """Serve until told to end."""
    file, home = Path(arguments[0]), Path(arguments[1])
    config = checked_config(
        {"http": {"port": 0}, "grpc": {"port": 0}, "admin": {"port": 0}}, "the bench"
    )

    def parts_of(config: ServingConfig, home: Path) -> Parts:
        return Parts(SessionEngine(open_session(file), (Counting(),)))

    async def run() -> None:
        await ServingProcess(config, home, parts_of).run()

    uvloop.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
