"""A small engine that runs a function, for tests of the protocols in front of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serving.errors import (
    BackendError,
    ClientGoneError,
    DeadlineError,
    NotReadyError,
    OverloadedError,
    ServingError,
    UnknownModelError,
)
from serving.interfaces import (
    TRACKS,
    Answer,
    Array,
    Call,
    Done,
    Observer,
    Served,
    ServedBatch,
    Track,
    VersionState,
    num_rows_of,
)
from tasks.contracts.conversion import Signature

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

SIGNATURE = Signature.model_validate(
    {
        "inputs": [
            {"name": "categorical", "dtype": "int32", "shape": ("batch", 2)},
            {"name": "numeric", "dtype": "float32", "shape": ("batch", 3)},
        ],
        "output": {"name": "score", "dtype": "float32", "shape": ("batch",)},
        "largest": {"batch": 4096},
    }
)


def sums(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """The sum of all inputs of a row, where a missing number counts as 0."""
    numbers = np.nan_to_num(inputs["numeric"])
    return {"score": inputs["categorical"].sum(1).astype(np.float32) + numbers.sum(1)}


class InlineEngine:
    """One model, one version a track; what is queued in a turn of the loop is one batch."""

    def __init__(
        self,
        run: Run,
        name: str = "sums",
        signature: Signature = SIGNATURE,
        observers: Sequence[Observer] = (),
        version: str | None = "1",
    ) -> None:
        self.run = run
        self.name = name
        self.takes = signature
        self.observers = observers
        self.tracks: dict[Track, str | None] = {track: None for track in TRACKS}
        self.tracks["stable"] = version
        self.delay_s = 0.0
        self.most_queued = 10_000
        self.refuses: ServingError | None = None
        self.answered: list[Call] = []
        self.dropped: list[Call] = []
        self.registered: set[str] = {"1", "2"}
        self._queue: list[tuple[Call, Done]] = []
        self._waiting = False

    def submit(self, call: Call, done: Done) -> None:
        loop = asyncio.get_running_loop()
        if len(self._queue) >= self.most_queued:
            loop.call_soon(done, call, OverloadedError("the queue is full", 1.0))
            return
        self._queue.append((call, done))
        if not self._waiting:
            self._waiting = True
            if self.delay_s:
                loop.call_later(self.delay_s, self._turn)
            else:
                loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._waiting = False
        queue, self._queue = self._queue, []
        ready: list[tuple[Call, Done]] = []
        for call, done in queue:
            if call.is_gone:
                self.dropped.append(call)
                done(call, ClientGoneError("gone"))
            elif call.deadline is not None and time.monotonic() > call.deadline:
                done(call, DeadlineError("its time was over before it was computed"))
            else:
                ready.append((call, done))
        if ready:
            self._compute(ready)

    def _compute(self, ready: list[tuple[Call, Done]]) -> None:
        calls = tuple(call for call, _ in ready)
        inputs = calls[0].inputs
        if len(calls) > 1:
            inputs = {n: np.concatenate([c.inputs[n] for c in calls]) for n in inputs}
        started = time.monotonic()
        try:
            outputs = self.run(inputs)
        except RuntimeError as exc:
            for call, done in ready:
                done(call, BackendError(f"the model failed: {exc}"))
            return
        version = calls[0].version or self.tracks[calls[0].track] or "1"
        served = Served(self.name, version, "onnx-fp32", calls[0].track, "cpu")
        at = 0
        for call, done in ready:
            part = {name: array[at : at + call.num_rows] for name, array in outputs.items()}
            at += call.num_rows
            self.answered.append(call)
            done(call, Answer(part, served))
        finished = time.monotonic()
        assert num_rows_of(inputs) == at
        batch = ServedBatch(calls, inputs, outputs, served, started, finished, time.time())
        for observer in self.observers:
            observer.served(batch)

    def refusal(
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> ServingError | None:
        return self.refuses

    def signature(
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> Signature:
        if model != self.name:
            raise UnknownModelError(f"there is no model {model!r} here; there is {self.name!r}")
        if version is not None and version not in self.tracks.values():
            raise UnknownModelError(f"model {model!r} has no version {version!r} here")
        if version is None and self.tracks[track] is None:
            raise NotReadyError(f"model {model!r} has nothing in track {track!r}", 1.0)
        return self.takes

    def states(self) -> Sequence[VersionState]:
        versions = sorted({version for version in self.tracks.values() if version is not None})
        if not versions:
            reason = "the registry has no champion; promote a version"
            return [VersionState(self.name, "", "UNAVAILABLE", reason)]
        return [
            VersionState(
                self.name,
                version,
                "READY",
                tracks=tuple(track for track, named in self.tracks.items() if named == version),
                variant="onnx-fp32",
                hardware="cpu",
                platform="onnxruntime_onnx",
            )
            for version in versions
        ]

    def is_ready(self, model: str | None = None, version: str | None = None) -> bool:
        if model not in (None, self.name):
            return False
        if version is not None:
            return version in self.tracks.values()
        return self.tracks["stable"] is not None

    async def load(self, model: str, version: str | None = None) -> VersionState:
        if model != self.name or (version or "1") not in self.registered:
            raise UnknownModelError(f"the registry has no version {version!r} of {model!r}")
        if not self.registered:
            raise NotReadyError("nothing is registered")
        self.tracks["stable"] = version or "1"
        return self.states()[0]

    async def unload(self, model: str, version: str | None = None) -> None:
        for track in TRACKS:
            if version in (None, self.tracks[track]):
                self.tracks[track] = None

    async def set_tracks(self, model: str, tracks: Mapping[Track, str | None]) -> None:
        if model != self.name or not {v for v in tracks.values() if v} <= self.registered:
            raise UnknownModelError(f"the registry has no such versions of {model!r}: {tracks}")
        self.tracks.update(tracks)
