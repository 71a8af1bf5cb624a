"""A serving process around one ONNX session, to measure the protocol in front of it.

    python -m infra.bench.serving.session_engine MODEL_FILE STATE_FOLDER PORT

What came in during a turn of the loop is computed together, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import uvloop
from onnx import TensorProto, helper, numpy_helper

from serving.assembly import Components, ServingProcess
from serving.config import ServingConfig, checked_config
from serving.errors import NotReadyError, ServingError, UnknownModelError
from serving.interfaces import (
    Answer,
    Call,
    Done,
    Observer,
    Served,
    ServedBatch,
    Track,
    VersionState,
)
from tasks.contracts.conversion import MOST_ROWS, Signature

MODEL = "tabular"
_VERSION = "1"
_MOST_TOGETHER = 256


CATEGORICAL, NUMERIC = 7, 72
_CODES, _WIDTH, _HIDDEN = 512, 16, (256, 128)

SIGNATURE = Signature.model_validate(
    {
        "inputs": [
            {"name": "categorical", "dtype": "int32", "shape": ("batch", CATEGORICAL)},
            {"name": "numeric", "dtype": "float32", "shape": ("batch", NUMERIC)},
        ],
        "output": {"name": "score", "dtype": "float32", "shape": ("batch",)},
        "largest": {"batch": MOST_ROWS},
    }
)


def write_program(path: Path) -> Path:
    """Embeddings, missing numbers as zero, two hidden layers, a sigmoid; weights are seeded."""
    rng = np.random.default_rng(7)
    weights: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    nodes = [
        helper.make_node("IsNaN", ["numeric"], ["absent"]),
        helper.make_node("Where", ["absent", "zero", "numeric"], ["numbers"]),
        helper.make_node("Cast", ["absent"], ["flags"], to=TensorProto.FLOAT),
    ]
    parts = ["numbers", "flags"]
    for column in range(CATEGORICAL):
        weights[f"table{column}"] = rng.normal(size=(_CODES, _WIDTH)).astype(np.float32)
        nodes += [
            helper.make_node("Gather", ["categorical", f"at{column}"], [f"code{column}"], axis=1),
            helper.make_node("Gather", [f"table{column}", f"code{column}"], [f"part{column}"]),
        ]
        parts.append(f"part{column}")
    nodes.append(helper.make_node("Concat", parts, ["x0"], axis=1))
    width = 2 * NUMERIC + CATEGORICAL * _WIDTH
    for layer, hidden in enumerate((*_HIDDEN, 1)):
        scale = np.float32(1 / np.sqrt(width))
        weights[f"w{layer}"] = rng.normal(size=(width, hidden)).astype(np.float32) * scale
        weights[f"b{layer}"] = np.zeros(hidden, np.float32)
        nodes.append(
            helper.make_node("Gemm", [f"x{layer}", f"w{layer}", f"b{layer}"], [f"y{layer}"])
        )
        kind = "Relu" if layer < len(_HIDDEN) else "Sigmoid"
        nodes.append(helper.make_node(kind, [f"y{layer}"], [f"x{layer + 1}"]))
        width = hidden
    nodes.append(helper.make_node("Squeeze", [f"x{len(_HIDDEN) + 1}", "one"], ["score"]))
    constants = [
        numpy_helper.from_array(np.float32(0), "zero"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
        *(numpy_helper.from_array(np.int64(at), f"at{at}") for at in range(CATEGORICAL)),
        *(numpy_helper.from_array(array, name) for name, array in weights.items()),
    ]
    described = [
        ("categorical", TensorProto.INT32, ["batch", CATEGORICAL]),
        ("numeric", TensorProto.FLOAT, ["batch", NUMERIC]),
        ("score", TensorProto.FLOAT, ["batch"]),
    ]
    inputs = [helper.make_tensor_value_info(*told) for told in described]
    graph = helper.make_graph(nodes, "tabular", inputs[:2], inputs[2:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


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
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> ServingError | None:
        """See `Engine.refusal`: everything is read."""
        return None

    def signature(
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> Signature:
        """See `Engine.signature`."""
        if model != MODEL:
            raise UnknownModelError(f"there is no model {model!r} here")
        return SIGNATURE

    def states(self) -> Sequence[VersionState]:
        """See `Engine.states`."""
        return [VersionState(MODEL, _VERSION, "READY", tracks=("stable",))]

    def is_ready(self, model: str | None = None, version: str | None = None) -> bool:
        """See `Engine.is_ready`."""
        return True

    async def load(self, model: str, version: str | None = None) -> VersionState:
        """Refuse: there is nothing else to load."""
        raise NotReadyError("a bench loads nothing")

    async def unload(self, model: str, version: str | None = None) -> None:
        """Refuse: the bench ends with its model."""
        raise NotReadyError("a bench unloads nothing")

    async def set_tracks(self, model: str, tracks: Mapping[Track, str | None]) -> None:
        """Refuse: there is one version."""
        raise NotReadyError("a bench has one track")


def main(file: str, home: str, port: str) -> None:
    """Serve until the process is ended."""
    ports = {"http": {"port": int(port)}, "grpc": {"port": 0}, "admin": {"port": 0}}

    def components_of(config: ServingConfig, home: Path) -> Components:
        return Components(SessionEngine(open_session(Path(file)), (Counting(),)))

    async def run() -> None:
        await ServingProcess(checked_config(ports, "the bench"), Path(home), components_of).run()

    uvloop.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
