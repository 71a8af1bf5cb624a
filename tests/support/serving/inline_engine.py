"""A small engine that runs a function, for tests of the protocols in front of it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serving.errors import ClientGoneError, NotReadyError, ServingError, UnknownModelError
from serving.interfaces import TRACKS, Answer, Array, Call, Done, Served, Track, VersionState
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
    """One model, `sums`, with one version a track; each call is computed alone."""

    def __init__(self, run: Run = sums, version: str | None = "1") -> None:
        self.run = run
        self.tracks: dict[Track, str | None] = dict.fromkeys(TRACKS) | {"stable": version}
        self.delay_s = 0.0
        self.refuses: ServingError | None = None
        self.num_answered = 0

    def submit(self, call: Call, done: Done) -> None:
        asyncio.get_running_loop().call_later(self.delay_s, self._answer, call, done)

    def _answer(self, call: Call, done: Done) -> None:
        if call.is_gone:
            done(call, ClientGoneError("gone"))
            return
        self.num_answered += 1
        version = call.version or self.tracks[call.track] or "1"
        served = Served("sums", version, "onnx-fp32", call.track, "cpu")
        done(call, Answer(self.run(call.inputs), served))

    def refusal(self, *asked: object) -> ServingError | None:
        return self.refuses

    def signature(
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> Signature:
        if model != "sums" or version not in (None, *self.tracks.values()):
            raise UnknownModelError(f"there is no model {model!r} with version {version!r} here")
        if version is None and self.tracks[track] is None:
            raise NotReadyError(f"model {model!r} has nothing in track {track!r}", 1.0)
        return SIGNATURE

    def states(self) -> Sequence[VersionState]:
        versions = sorted({version for version in self.tracks.values() if version is not None})
        if not versions:
            return [VersionState("sums", "", "UNAVAILABLE", "promote a version")]
        tracks = {v: tuple(t for t, named in self.tracks.items() if named == v) for v in versions}
        about = {"variant": "onnx-fp32", "hardware": "cpu", "platform": "onnxruntime_onnx"}
        return [VersionState("sums", v, "READY", tracks=tracks[v], **about) for v in versions]

    def is_ready(self, model: str | None = None, version: str | None = None) -> bool:
        wanted = version or self.tracks["stable"]
        return model in (None, "sums") and wanted is not None and wanted in self.tracks.values()

    async def load(self, model: str, version: str | None = None) -> VersionState:
        await self.set_tracks(model, {"stable": version or "1"})
        return self.states()[0]

    async def unload(self, model: str, version: str | None = None) -> None:
        for track in TRACKS:
            if version in (None, self.tracks[track]):
                self.tracks[track] = None

    async def set_tracks(self, model: str, tracks: Mapping[Track, str | None]) -> None:
        if model != "sums" or not {v for v in tracks.values() if v} <= {"1", "2"}:
            raise UnknownModelError(f"the registry has no such versions of {model!r}: {tracks}")
        self.tracks.update(tracks)
