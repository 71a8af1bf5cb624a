"""What an answer over HTTP costs, beside the model alone and beside other servers.

CPU time of the whole server process tree (all threads, user and system) for a request of one row,
with 1 and with 64 connections; the client's is not counted. The model alone is `session.run` with
decoding of the same JSON by msgspec, numpy arrays, and encoding of the answer, in this process. All
take turns, and what counts is the ratio within a turn. MLServer and KServe are measured where their
environments are (`.venv-mlserver`, `.venv-kserve`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil

from infra.bench.figures import Figure, LeftOut, Measured, at_most
from infra.bench.parts import Bench
from infra.bench.serving.session_engine import MODEL, open_session
from infra.bench.serving.tabular_program import CATEGORICAL, NUMERIC, write_program
from serving.assembly import ADDRESS_FILE
from tasks.kernel.settings import PROJECT_ROOT, tool_python

ROUNDS = 7
SECONDS = 1.2
CONNECTIONS = (1, 64)
BOUNDS = {1: 4.5, 64: 2.2}
BOUND_BESIDE = {"mlserver": 0.25, "kserve": 0.20}
PATH = f"/v2/models/{MODEL}/infer"
_START_S = 120
_DTYPES = {"INT32": np.int32, "FP32": np.float32}


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class _Request(msgspec.Struct):
    inputs: list[_Tensor]


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[float]


class _Answer(msgspec.Struct):
    model_name: str
    outputs: list[_Output]


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
    session = open_session(file)
    decoder, encoder = msgspec.json.Decoder(_Request), msgspec.json.Encoder()

    def call() -> bytes:
        inputs = {
            tensor.name: np.array(tensor.data, _DTYPES[tensor.datatype]).reshape(tensor.shape)
            for tensor in decoder.decode(body).inputs
        }
        (score,) = session.run(None, inputs)
        output = _Output("score", "FP32", score.shape, score.tolist())
        return encoder.encode(_Answer(MODEL, [output]))

    return call


def tree_cpu_ns(pid: int) -> int:
    """CPU time of a process and all below it, every thread, in nanoseconds."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total


@contextmanager
def _running(
    command: list[str], folder: Path, ready: Callable[[], int | None]
) -> Iterator[tuple[int, int]]:
    """A server process and its port, once it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OTEL_SDK_DISABLED": "true"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_S
        while (port := ready()) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start: {(folder / 'log.txt').read_text()}")
            time.sleep(0.1)
        yield process.pid, port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ours(model: Path, folder: Path) -> tuple[list[str], Callable[[], int | None]]:
    def ready() -> int | None:
        try:
            told = json.loads((folder / ADDRESS_FILE).read_text())
        except FileNotFoundError:
            return None
        return int(str(told["http"]).rpartition(":")[2])

    program = ["-m", "infra.bench.serving.session_engine", str(model), str(folder)]
    start = f"import sys, runpy; sys.path.insert(0, {str(PROJECT_ROOT)!r}); "
    start += f"sys.argv = {program[1:]!r}; runpy.run_module(sys.argv[0], run_name='__main__')"
    return [sys.executable, "-c", start], ready


def _answers(port: int) -> int | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=2):
            return port
    except (urllib.error.URLError, OSError):
        return None


def _mlserver(
    python: Path, model: Path, folder: Path, port: int
) -> tuple[list[str], Callable[[], int | None]]:
    runtime = Path(__file__).with_name("mlserver_runtime.py")
    (folder / runtime.name).write_text(runtime.read_text())
    settings = {
        "http_port": port,
        "grpc_port": port + 1,
        "metrics_port": port + 2,
        "host": "127.0.0.1",
        "parallel_workers": 0,
        "debug": False,
        "use_structured_logging": False,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    told = {
        "name": MODEL,
        "implementation": "mlserver_runtime.OnnxRuntime",
        "parameters": {"uri": str(model)},
    }
    (folder / "model-settings.json").write_text(json.dumps(told))
    return [str(python.parent / "mlserver"), "start", "."], lambda: _answers(port)


def _kserve(
    python: Path, model: Path, folder: Path, port: int
) -> tuple[list[str], Callable[[], int | None]]:
    # A copy: beside the original lie modules with names of Python's own.
    program = folder / "kserve_server.py"
    program.write_text(Path(__file__).with_name(program.name).read_text())
    return [str(python), str(program), str(model), str(port)], lambda: _answers(port)


def _load(port: int, connections: int, body: Path, seconds: float) -> int:
    """Ask for a while; how many requests were answered."""
    command = [
        sys.executable,
        "-m",
        "infra.bench.serving.load_client",
        str(port),
        PATH,
        str(connections),
    ]
    told = subprocess.run(
        [*command, str(seconds), str(body)],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode:
        raise RuntimeError(f"port {port}, {connections} connections: {told.stderr}")
    answer = json.loads(told.stdout)
    if answer["refused"]:
        raise RuntimeError(f"{answer['refused']} of {answer['answered']} were not answered 200")
    return int(answer["answered"])


def _alone_us(call: Callable[[], bytes], seconds: float) -> float:
    call()
    count, started = 0, time.thread_time_ns()
    until = time.monotonic() + seconds / 2
    while time.monotonic() < until:
        for _ in range(100):
            call()
        count += 100
    return (time.thread_time_ns() - started) / count / 1e3


def _paced_us(call: Callable[[], bytes], seconds: float) -> float:
    """The same with a rest after each call, as a server has that waits for its one client.

    What other programs do in the rest they do to the caches too: on a machine with company a call
    after a rest costs a multiple. Told beside the figure, not part of it.
    """
    spent = count = 0
    until = time.monotonic() + seconds / 2
    while time.monotonic() < until:
        time.sleep(1e-4)
        started = time.thread_time_ns()
        call()
        spent += time.thread_time_ns() - started
        count += 1
    return spent / count / 1e3


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """CPU microseconds of a request, by server and connections, one for each turn."""
    found: dict[str, list[float]] = {}
    with ExitStack() as running:
        model = write_program(folder / "model.onnx")
        body = folder / "body.json"
        body.write_bytes(one_row())
        alone = model_alone(model, body.read_bytes())
        servers = dict(_servers(folder, model, running))
        for port, connections in ((p, c) for _, p in servers.values() for c in CONNECTIONS):
            _load(port, connections, body, seconds)  # not counted
        for _ in range(rounds):
            found.setdefault("alone", []).append(_alone_us(alone, seconds))
            found.setdefault("paced", []).append(_paced_us(alone, seconds))
            for connections in CONNECTIONS:
                for name, (pid, port) in servers.items():
                    before = tree_cpu_ns(pid)
                    answered = _load(port, connections, body, seconds)
                    cost = (tree_cpu_ns(pid) - before) / answered / 1e3
                    found.setdefault(f"{name} {connections}", []).append(cost)
    return found


def _servers(
    folder: Path, model: Path, running: ExitStack
) -> Iterator[tuple[str, tuple[int, int]]]:
    for name in ("ours", "mlserver", "kserve"):
        place = folder / name
        place.mkdir()
        if name == "ours":
            command, ready = _ours(model, place)
        else:
            python = tool_python(name)
            if python is None:
                continue
            made = _mlserver if name == "mlserver" else _kserve
            command, ready = made(python, model, place, _free_ports())
        yield name, running.enter_context(_running(command, place, ready))


def _free_ports() -> int:
    """The first of three ports that nothing listens on."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for more in (1, 2):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port + more))
            except OSError:
                continue
            return port


def figures(bench: Bench) -> Measured:
    """Cost of an answer over HTTP, against the model alone and against other servers."""
    seconds, rounds = bench.size((SECONDS, ROUNDS), (0.2, 1))
    found = {k: np.array(v) for k, v in measure(bench.folder, rounds, seconds).items()}
    measured: Measured = []
    for connections in CONNECTIONS:
        ours = found[f"ours {connections}"]
        told = f"{np.median(ours):.0f} us, the model alone {np.median(found['alone']):.0f} us"
        if connections == 1:
            told += f" ({np.median(found['paced']):.0f} us after rests)"
        ratio = float(np.median(ours / found["alone"]))
        name = f"HTTP answer, 1 row, {connections} connections, to the model alone"
        measured.append(at_most(name, ratio, BOUNDS[connections], told))
        measured += _beside(found, connections)
    return measured


def _beside(found: Mapping[str, np.ndarray], connections: int) -> Iterator[Figure | LeftOut]:
    ours = found[f"ours {connections}"]
    for name, bound in BOUND_BESIDE.items():
        theirs = found.get(f"{name} {connections}")
        title = f"HTTP answer, 1 row, {connections} connections, to {name}"
        if theirs is None:
            yield LeftOut(title, f"there is no environment .venv-{name}")
        else:
            told = f"{np.median(ours):.0f} us, {name} {np.median(theirs):.0f} us"
            yield at_most(title, float(np.median(ours / theirs)), bound, told)
