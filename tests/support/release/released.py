"""A whole installation that releases: registry, serving process, Envoy before it, clients.

Nothing stands in for anything: versions are registered and converted, `python -m serving` serves
them behind `falaj gateway run`, clients send tokens over TLS, and what is decided reads
the log that the serving process writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from flows.config import PipelineConfig, read_pipeline_config
from flows.release import LoggedRequests, RegistryChampions, release_config, traffic_of
from infra.bench.processes import running
from infra.bench.serving.installation import HEALTHY, Signer, envoy, make_champion, write_settings
from infra.gateway.envoy import Admin
from infra.orchestration.embedded import free_port
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.serving import live_addresses
from tasks.conversion.config import ConversionConfig
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT, Settings
from tasks.predictions.labels import import_labels
from tasks.release.ledger import ReleaseLedger
from tasks.release.records import Release
from tasks.release.rollout import Cycle, Releasing
from tests.support.conversion.programs import SmallNetwork
from tests.support.host.processes import run_falaj, wait_until
from tests.support.serving.served import FLIGHTS, ServedHome, flight_rows

LIMIT_S = 120.0
FORM = ConversionConfig(formats=("onnx-fp32",), batch_sizes=(1,), measurement="quick")
NUM_ROWS = 200
NUM_CLIENTS, PER_S = 40, 250.0
STEPS = (("shadow", 0, 200), ("fifth", 20, 60), ("half", 50, 100), ("all", 100, 100))
RELEASE: dict[str, Any] = {
    "steps": [
        {"name": name, "candidate_percent": share, "min_requests": number, "min_minutes": 0}
        | ({} if share else {"mirror_percent": 100})
        for name, share, number in STEPS
    ],
    "settle_s": 0.5,
    "max_score_shift": 1.0,
}
"""Steps that pass in seconds; the bounds are the defaults, except that scores decide nothing: they
would now and then be faster than labels."""


@dataclass(frozen=True)
class Asked:
    """One request of a client and its answer; status 0 where there was none."""

    subject: str
    row: int
    sent_s: float
    status: int
    version: str = ""
    request_id: str = ""
    score: float = float("nan")


@dataclass
class Whole:
    """One installation with all its processes."""

    home: Path
    repo: Path
    served: ServedHome
    signer: Signer
    ports: dict[str, int]
    server: ExitStack = field(default_factory=ExitStack)
    edge: ExitStack = field(default_factory=ExitStack)
    envoy: psutil.Process | None = None
    refs: dict[str, ModelVersionRef] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """Of this installation."""
        return Settings.from_environment(self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands."""
        own = {"FALAJ_HOME": str(self.home), "FALAJ_FEATURE_REPO": str(self.repo)}
        return {**os.environ, **own, "FALAJ_DATABASE_URL": ""}

    @property
    def config(self) -> PipelineConfig:
        """The use case, its steps quick."""
        return read_pipeline_config(self.repo)

    @property
    def releasing(self) -> Releasing:
        """What a release is carried out with: the real ports."""
        settings = self.settings
        ledger = ReleaseLedger(settings.metadata_url)
        return Releasing(ledger, traffic_of(settings), RegistryChampions(settings))

    @property
    def release(self) -> Release:
        """The newest one."""
        return self.releasing.ledger.last_release(FLIGHTS)

    @property
    def tracks(self) -> dict[str, str | None]:
        """Of the serving process."""
        return dict(traffic_of(self.settings).tracks(FLIGHTS))

    @property
    def champion(self) -> str | None:
        """Number that the alias names."""
        return RegistryChampions(self.settings).champion(FLIGHTS)

    @property
    def authority(self) -> Path:
        """Vouches for the edge."""
        return self.home / "edge" / "certificates" / "public-authority.pem"

    def add(self, network: SmallNetwork) -> str:
        """Register and convert a version; its number."""
        ref = self.served.add_flights(network=network)
        self.served.convert(ref, FORM)
        self.refs[str(ref.version)] = ref
        return str(ref.version)

    def promote(self, number: str) -> None:
        """What a promotion does to the registry."""
        make_champion(self.refs[number], self.served.location)

    def begin(self, number: str) -> Release:
        """Promote a version and begin its release."""
        self.promote(number)
        return self.releasing.begin(FLIGHTS, release_config(self.config), "a test")

    def evaluate(self) -> Cycle:
        """One evaluation cycle of the open release."""
        log = LoggedRequests(self.home, self.config.clock)
        return self.releasing.evaluate(self.release, log, datetime.now(UTC))

    def evaluate_until(self, step: str = "") -> list[Cycle]:
        """Evaluate until the release is in a step, or has ended; all that was found."""
        seen: list[Cycle] = []
        deadline = time.monotonic() + LIMIT_S
        while (now := self.release).is_open and now.current.name != step:
            assert time.monotonic() < deadline, seen[-1].decision
            time.sleep(0.2)
            seen.append(self.evaluate())
        return seen

    def command(self, *words: str) -> str:
        """Run `falaj` with these words; what it says."""
        code, said = run_falaj(*words, **self.environment)
        assert code == 0, said
        return said

    def num_loads(self, number: str) -> int:
        """How often serving processes have loaded a version."""
        said = (self.home / "serving.log").read_text(errors="replace")
        return said.count(f"{FLIGHTS} version {number}: onnx-fp32 serves")

    def label(self, asked: Sequence[Asked], chances: NDArray[np.float64], seed: int = 3) -> int:
        """Import a label for each answered request, drawn by the chance of its row."""
        drawn = np.random.default_rng(seed)
        answered = [one for one in asked if one.status == 200]
        names = [one.request_id for one in answered]
        labels = [int(drawn.random() < chances[one.row]) for one in answered]
        file = self.home / "labels.parquet"
        pq.write_table(pa.table({"request_id": names, "label": labels}), file)
        return import_labels(self.home, FLIGHTS, file, datetime.now(UTC)).rows

    def scores(self, number: str) -> NDArray[np.float64]:
        """What a version's program answers to the rows of the clients."""
        return np.asarray(self.served.expected(self.refs[number], client_rows()), float)

    def start_server(self) -> None:
        """Start the serving process, and wait until it answers."""
        line = [sys.executable, "-m", "serving", "--home", str(self.home), "--admin-port", "0"]
        line += ["--http-port", str(self.ports["http"]), "--grpc-port", str(self.ports["grpc"])]

        def is_there() -> bool:
            return bool(live_addresses(self.home))

        log = self.home / "serving.log"
        self.server.enter_context(running(line, log, is_there, self.environment))

    def start_edge(self) -> None:
        """Start Envoy, and wait until it has found the server well."""
        self.envoy = self.edge.enter_context(envoy(self.home))

    def is_reached(self) -> bool:
        """Whether Envoy has found the server well."""
        found = Admin(self.home / "edge").stats(HEALTHY)
        return bool(found) and all(found.values())

    def kill_server(self) -> None:
        """As a machine without memory does."""
        os.kill(int(live_addresses(self.home)[0]["pid"]), signal.SIGKILL)
        self.server.close()

    def kill_edge(self) -> None:
        """Kill Envoy itself; what had started it ends by that."""
        self.envoy.kill()
        self.edge.close()


def client_rows() -> dict[str, Any]:
    """Rows that the clients ask for; JSON has no number that is none."""
    return {name: np.nan_to_num(values, nan=8.0) for name, values in flight_rows(NUM_ROWS).items()}


@contextmanager
def whole_installation(folder: Path, networks: Sequence[SmallNetwork]) -> Iterator[Whole]:
    """Register versions, promote the first one, and start all processes."""
    home, repo = folder / "home", folder / "feature_repo"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT_ROOT / DEFAULT_FEATURE_REPO, repo, ignore=ignored)
    ports = {name: free_port() for name in ("edge", "http", "grpc")}
    whole = Whole(home, repo, ServedHome.at(home), Signer(), ports)
    write_settings(home, whole.signer, ports, FLIGHTS)
    serving = {
        "models": [{"name": FLIGHTS, "on_move": "offer"}],
        "security": {"edge": True},
        "log": {"flush_s": 0.2},
        "poll_s": 0.3,
    }
    (repo / "serving.yaml").write_text(yaml.safe_dump(serving))
    file = repo / "use_case.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"release": RELEASE}))
    for network in networks:
        whole.add(network)
    whole.promote("1")
    with whole.server, whole.edge:
        whole.start_server()
        whole.start_edge()
        yield whole


def _tensor(name: str, kinds: dict[str, str], row: NDArray[Any]) -> dict[str, Any]:
    shape = [1, len(row)]
    return {"name": name, "datatype": kinds[str(row.dtype)], "shape": shape, "data": row.tolist()}


class Load:
    """Clients, each with a name and a connection of its own, that ask without end."""

    def __init__(self, whole: Whole) -> None:
        self.asked: list[Asked] = []
        self._whole, self._num, self._pause_s = whole, NUM_CLIENTS, NUM_CLIENTS / PER_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        kinds = {"int32": "INT32", "float32": "FP32"}
        tensors = client_rows()
        self._bodies = [
            json.dumps({"inputs": [_tensor(n, kinds, v[row]) for n, v in tensors.items()]}).encode()
            for row in range(NUM_ROWS)
        ]

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_for(self._num)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    @property
    def subjects(self) -> list[str]:
        """Names of the clients."""
        return sorted({one.subject for one in self.asked})

    def since(self, moment: float) -> list[Asked]:
        """What was sent since."""
        return [one for one in self.asked if one.sent_s >= moment]

    def versions_since(self, moment: float) -> dict[str, set[str]]:
        """Versions that have answered each client since."""
        found: dict[str, set[str]] = {}
        for one in self.since(moment):
            if one.status == 200:
                found.setdefault(one.subject, set()).add(one.version)
        return found

    def wait_for(self, number: int) -> None:
        """Wait for so many further answers."""
        wanted = len(self.asked) + number
        wait_until(lambda: len(self.asked) >= wanted, f"{number} answers", LIMIT_S)

    async def _run(self) -> None:
        context = ssl.create_default_context(cafile=str(self._whole.authority))
        await asyncio.gather(*(self._client(n, context) for n in range(self._num)))

    async def _client(self, number: int, context: ssl.SSLContext) -> None:
        subject, drawn = f"client-{number}", np.random.default_rng(number)
        token = self._whole.signer.token(f"infer:{FLIGHTS}", sub=subject)
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        url = f"https://localhost:{self._whole.ports['edge']}/v2/models/{FLIGHTS}/infer"
        await asyncio.sleep(self._pause_s * number / self._num)
        connector = aiohttp.TCPConnector(ssl=context, limit=1, family=socket.AF_INET)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            while not self._stopping.is_set():
                row, sent = int(drawn.integers(NUM_ROWS)), time.time()
                try:
                    async with session.post(url, data=self._bodies[row]) as answer:
                        content = await answer.read()
                except (OSError, aiohttp.ClientError):
                    self.asked.append(Asked(subject, row, sent, 0))
                    await asyncio.sleep(0.1)
                    continue
                self.asked.append(_asked(subject, row, sent, answer, content))
                await asyncio.sleep(max(0.0, sent + self._pause_s - time.time()))


def _asked(
    subject: str, row: int, sent: float, answer: aiohttp.ClientResponse, content: bytes
) -> Asked:
    score = json.loads(content)["outputs"][0]["data"][0] if answer.status == 200 else float("nan")
    named = (answer.headers.get(f"x-{name}", "") for name in ("falaj-version", "request-id"))
    return Asked(subject, row, sent, answer.status, *named, score)
