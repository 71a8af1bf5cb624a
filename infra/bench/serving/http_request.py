"""What an answer over HTTP costs, beside the model alone and beside other servers.

CPU time of the whole server process tree (all threads, user and system) for a request of one row,
with 1 and with 64 connections; the client's is not counted. Ours is the serving process as it is
installed, without its log of predictions, which has a measurement of its own. The model alone is
`session.run` with decoding of the same JSON by msgspec, numpy arrays, and encoding of the answer,
in this process. All take turns, and what counts is the ratio within a turn. MLServer and KServe are
measured where their environments are (`.venv-mlserver`, `.venv-kserve`).
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import psutil

from infra.bench.figures import Figure, LeftOut, Measured, at_most, interleaved, median_ratio
from infra.bench.parts import Bench
from infra.bench.processes import running
from infra.bench.serving import peers
from infra.bench.serving.clients import cpu_us, request
from infra.bench.serving.installation import (
    CATEGORICAL,
    MODEL,
    NUMERIC,
    BenchHome,
    Tabular,
    serving,
)
from infra.orchestration.embedded import free_port
from infra.platform.api import answers
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.kernel.settings import tool_python

BOUNDS = {1: 4.5, 64: 2.2}
"""By the number of connections."""
BOUND_BESIDE = {"mlserver": 0.25, "kserve": 0.20}
UNLOGGED = {"log": {"enabled": False}}


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class _Request(msgspec.Struct):
    inputs: list[_Tensor]


class _Answer(msgspec.Struct):
    model_name: str
    outputs: list[_Tensor]


def one_row() -> bytes:
    """The body of a request of one row, as a program would send it."""
    rng = np.random.default_rng(3)
    tensors = [
        ("categorical", "INT32", CATEGORICAL, rng.integers(0, 500, CATEGORICAL).tolist()),
        ("numeric", "FP32", NUMERIC, rng.normal(size=NUMERIC).astype(np.float32).tolist()),
    ]
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1, width], "data": data}
        for name, datatype, width, data in tensors
    ]
    return json.dumps({"inputs": inputs}).encode()


def model_alone(file: Path, body: bytes) -> Callable[[], bytes]:
    """Decode, run, encode: the least that a server must do."""
    session = peers.session(str(file))
    decoder, encoder = msgspec.json.Decoder(_Request), msgspec.json.Encoder()

    def call() -> bytes:
        inputs = {each.name: peers.array(each, each.data) for each in decoder.decode(body).inputs}
        (score,) = session.run(None, inputs)
        output = _Tensor("score", "FP32", list(score.shape), score.tolist())
        return encoder.encode(_Answer(MODEL, [output]))

    return call


def _command(name: str, model: Path, folder: Path, port: int) -> list[str] | None:
    """What starts another server in its folder; None where it has no environment."""
    python = tool_python(name)
    if python is None:
        return None
    # A copy: beside the original lie modules with names of Python's own.
    (folder / "peers.py").write_text(Path(peers.__file__).read_text())
    if name == "kserve":
        return [str(python), "peers.py", str(model), str(port)]
    settings = {
        **{"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()},
        **{"host": "127.0.0.1", "parallel_workers": 0},
        **{"debug": False, "use_structured_logging": False},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    named = {"name": MODEL, "implementation": "peers.OnnxRuntime"}
    served = {**named, "parameters": {"uri": str(model)}}
    (folder / "model-settings.json").write_text(json.dumps(served))
    return [str(python.parent / "mlserver"), "start", "."]


def _alone_us(call: Callable[[], bytes], seconds: float) -> float:
    call()
    count, started = 0, time.thread_time_ns()
    until = time.monotonic() + seconds / 2
    while time.monotonic() < until:
        for _ in range(100):
            call()
        count += 100
    return (time.thread_time_ns() - started) / count / 1e3


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """CPU microseconds of a request, by server and connections, one for each turn."""
    world, body = BenchHome(folder / "home", Tabular), one_row()
    form = world.form(world.add(7, promote=True))
    assert form.files
    model, asked = world.store.path(form.files) / MODEL_FILE, request(MODEL, body)
    calls: dict[str, Callable[[], float]] = {
        "alone": partial(_alone_us, model_alone(model, body), seconds)
    }

    def cost_us(process: psutil.Process, port: int, connections: int) -> float:
        (cost,) = cpu_us([process], port, asked, connections, seconds)
        return cost

    with ExitStack() as stack:
        ports = {name: free_port() for name in ("ours", *BOUND_BESIDE)}
        ours = serving(world.home, {"http": ports["ours"]}, **UNLOGGED)
        processes = {"ours": stack.enter_context(ours)}
        for name in BOUND_BESIDE:
            own = folder / name
            ready = partial(answers, f"http://127.0.0.1:{ports[name]}/v2/health/ready")
            own.mkdir()
            if command := _command(name, model, own, ports[name]):
                one_thread = {"OMP_NUM_THREADS": "1", "OTEL_SDK_DISABLED": "true"}
                server = running(command, own / "log.txt", ready, one_thread, own)
                processes[name] = stack.enter_context(server)
        for name, process in processes.items():
            for count in BOUNDS:
                calls[f"{name} {count}"] = partial(cost_us, process, ports[name], count)
        return interleaved(calls, rounds)


def figures(bench: Bench) -> Measured:
    """Cost of an answer over HTTP, against the model alone and against other servers."""
    seconds, rounds = bench.size((1.2, 7), (0.2, 1))
    found = measure(bench.folder, rounds, seconds)
    return [
        _figure(found, connections, name, bound)
        for connections, to_alone in BOUNDS.items()
        for name, bound in {"alone": to_alone, **BOUND_BESIDE}.items()
    ]


def _figure(
    found: Mapping[str, list[float]], connections: int, other: str, bound: float
) -> Figure | LeftOut:
    alone = other == "alone"
    what = "the model alone" if alone else other
    title = f"HTTP answer, 1 row, {connections} connections, to {what}"
    ours = found[f"ours {connections}"]
    theirs = found.get("alone" if alone else f"{other} {connections}")
    if theirs is None:
        return LeftOut(title, f"there is no environment .venv-{other}")
    evidence = f"{statistics.median(ours):.0f} us, {what} {statistics.median(theirs):.0f} us"
    return at_most(title, median_ratio(ours, theirs), bound, evidence)
