"""Which hosts may be used now, how many ranks each takes, and which rest after a failure."""

import logging
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.training.elastic.config import ElasticConfig

LOGGER = logging.getLogger(__name__)
LOCAL_HOST = "localhost"
PROBE_S = 1.0
SCRIPT_LIMIT_S = 20.0
API_LIMIT_S = 10.0
LOOK_EVERY_S = 1.0
SHORTEST_REST_S = 5.0
# Bound of the doubling; a place that works for so long without a failure starts again.
LONGEST_REST_S = 300.0
MAX_DOUBLINGS = 20
MAX_PROBES = 32
API_URL = "https://kubernetes.default.svc"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A host goes into commands of ssh and paths of the rendezvous server.
HOST_LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})(?:(?::|\s+slots=)(\d{1,4}))?")

Slots = Mapping[str, int]
"""Host to the number of ranks that it takes."""


Discovery = Callable[[], Slots]
"""Hosts that may be used now; may be none. Raises TransientError where the source did not answer,
ConfigurationError where what it says cannot be understood."""


def discovery_of(config: ElasticConfig) -> Discovery:
    """The source of hosts that the configuration names; it is asked again at each call."""
    place, slots = config.place, config.slots_per_host
    match config.discovery:
        case "local":
            return lambda: {LOCAL_HOST: slots}
        case "ssh":
            return lambda: answering_hosts(hosts_of_file(Path(place), slots), config.ssh_port)
        case "script":
            return lambda: hosts_of_program(Path(place), slots)
        case "kubernetes":
            return lambda: ready_pods(place, slots)


def hosts_of_file(path: Path, default_slots: int) -> Slots:
    """Hosts of a file with one a line: `name`, `name:2` or `name slots=2`; `#` begins a comment.

    Raises:
        TransientError: it cannot be read.
        ConfigurationError: a line is no host.
    """
    try:
        text = path.read_text()
    except OSError as exc:
        raise TransientError(
            f"the hosts file {path} cannot be read ({exc.strerror}); the hosts of the last look "
            "are kept. Put the file back"
        ) from exc
    return parse_hosts(text, default_slots, str(path))


def answering_hosts(hosts: Slots, port: int) -> Slots:
    """The hosts without those whose SSH port does not answer within a second."""

    def answers(host: str) -> bool:
        try:
            with socket.create_connection((host, port), PROBE_S):
                return True
        except OSError:
            return False

    with ThreadPoolExecutor(MAX_PROBES) as pool:
        found = zip(hosts.items(), pool.map(answers, hosts), strict=True)
        return {host: slots for (host, slots), is_there in found if is_there}


def hosts_of_program(path: Path, default_slots: int) -> Slots:
    """Hosts that an executable prints as a hosts file has them, such as `discover_hosts.sh`.

    It is run with PATH and HOME alone.

    Raises:
        TransientError: it failed.
        ConfigurationError: it printed a line that is no host.
    """
    try:
        printed = subprocess.run(
            [str(path)],
            capture_output=True,
            text=True,
            timeout=SCRIPT_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        reason = getattr(exc, "stderr", None) or "it must be executable"
        raise TransientError(
            f"the discovery program {path} did not print hosts: {exc} ({reason.strip()[-300:]}); "
            "the hosts of the last look are kept"
        ) from exc
    return parse_hosts(printed.stdout, default_slots, str(path))


def ready_pods(
    place: str, slots: int, api_url: str = API_URL, account: Path = SERVICE_ACCOUNT
) -> Slots:
    """Ready pods with given labels, asked of the API server with the pod's service account.

    Args:
        place: namespace/label selector.
        slots: ranks of one pod.
        api_url: of the API server.
        account: folder with `token` and `ca.crt`; the token is read anew each time, it is renewed.

    Raises:
        TransientError: the API server did not answer.
    """
    namespace, _, selector = place.partition("/")
    secure = api_url.startswith("https:")
    try:
        token = (account / "token").read_text().strip()
        answer = httpx.get(
            f"{api_url}/api/v1/namespaces/{namespace}/pods",
            params={"labelSelector": selector},
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            timeout=API_LIMIT_S,
            verify=ssl.create_default_context(cafile=account / "ca.crt") if secure else True,
            trust_env=False,
        )
        pods = answer.raise_for_status().json()["items"]
        addresses = sorted(address for pod in pods if (address := _address_of(pod)))
    except (OSError, httpx.HTTPError, ValueError, KeyError) as exc:
        raise TransientError(
            f"the API server at {api_url} did not list the pods of {place} ({exc!r}); the hosts of "
            "the last look are kept. The service account needs the right to list pods"
        ) from exc
    return dict.fromkeys(addresses, slots)


def _address_of(pod: Any) -> str | None:
    """Where a pod is reached; None where it cannot take a rank now."""
    status, spec = pod["status"], pod["spec"]
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    is_ready = status.get("phase") == "Running" and conditions.get("Ready") == "True"
    if not is_ready or "deletionTimestamp" in pod["metadata"]:
        return None
    if "hostname" in spec and "subdomain" in spec:
        return f"{spec['hostname']}.{spec['subdomain']}"
    address: str | None = status.get("podIP")
    return address


def parse_hosts(text: str, default_slots: int, place: str) -> Slots:
    """Hosts of a hosts file's text; `place` names it in errors.

    Raises:
        ConfigurationError: a line is none of the known forms.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        found = HOST_LINE.fullmatch(entry)
        if found is None:
            raise ConfigurationError(
                f"{place}, line {number}: {line.strip()!r} is no host; expected `name`, `name:2` "
                "or `name slots=2`"
            )
        hosts[found[1]] = int(found[2] or default_slots)
    return {host: slots for host, slots in hosts.items() if slots}


class HostWatch:
    """Looks for hosts again and again in a thread of its own; a failed look changes nothing.

    A host that is missing from one look may only have been slow to answer: it counts as gone when
    it has been missing from `misses_to_be_gone` in a row.
    """

    misses_to_be_gone = 3

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._missed: dict[str, int] = {}
        self.slots: Slots = {}
        """Hosts as last seen; replaced whole by each look."""
        self.trouble = ""
        """Why the last look failed; empty where it did not."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look that is under way ends by itself."""
        self._stop.set()

    def look(self) -> None:
        """Look once."""
        try:
            found = self._discovery()
        except (TransientError, ConfigurationError) as exc:
            if str(exc) != self.trouble:
                LOGGER.warning("%s. Looking again in %g s", exc, LOOK_EVERY_S)
            self.trouble = str(exc)
            return
        self.trouble = ""
        missed = {h: self._missed.get(h, 0) + 1 for h in self.slots if h not in found}
        self._missed = {h: n for h, n in missed.items() if n < self.misses_to_be_gone}
        self.slots = {h: self.slots[h] for h in self._missed} | dict(found)

    def _run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self.look()
            self._stop.wait(max(0.0, LOOK_EVERY_S - (time.monotonic() - started)))


class Cooldown:
    """Keeps slots and hosts from being used again too soon.

    Args:
        shortest_s: rest after a first failure.
    """

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s = shortest_s
        self._num_failures: dict[str, int] = {}
        self._rests_until: dict[str, float] = {}

    def punish(self, place: str, now: float) -> float:
        """Note a failure of `place`; returns the seconds of its rest."""
        if now - self._rests_until.get(place, now) > LONGEST_REST_S:
            self._num_failures.pop(place, None)
        doublings = self._num_failures.get(place, 0)
        self._num_failures[place] = doublings + 1
        rest_s = min(self._shortest_s * 2.0 ** min(doublings, MAX_DOUBLINGS), LONGEST_REST_S)
        self.rest(place, rest_s, now)
        return rest_s

    def rest(self, place: str, rest_s: float, now: float) -> None:
        """Let `place` rest without holding anything against it."""
        self._rests_until[place] = max(now + rest_s, self._rests_until.get(place, 0.0))

    def is_resting(self, place: str, now: float) -> bool:
        """True where `place` must not be used yet."""
        return now < self._rests_until.get(place, 0.0)
