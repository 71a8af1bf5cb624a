"""The services of the platform: commands, environments, probes; and the process that runs them."""

import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import httpx
import psutil

from infra.gateway.config import AUTHORIZER_SOCKET, GatewayFiles, has_platform_listener
from infra.gateway.envoy import Admin
from infra.orchestration.client import (
    base_environment,
    client_settings,
    server_command,
    server_settings,
)
from infra.orchestration.embedded import free_port
from infra.platform import openbao
from infra.platform.api import (
    PROBE_TIMEOUT_S,
    NotFoundError,
    PrefectApi,
    answers,
    demand,
    end_cut_off,
    http_client,
    num_running_loops,
)
from infra.platform.config import (
    CONFIG_VARIABLE,
    COORDINATOR,
    DATABASE_URL,
    MLFLOW_PASSWORD,
    MLFLOW_SECRET,
    OPENBAO,
    REDIS_URL,
    REPORTS_HOME,
    SERVING,
    PlatformConfig,
    choose_ports,
    read_config,
    stored_config,
)
from infra.platform.files import (
    CutRun,
    Endpoint,
    PlatformFiles,
    ensure_password,
    now,
    only_supervisor,
    paused_pools,
    read_state,
    supervisor_pid,
)
from infra.platform.scaling import Load
from infra.platform.supervisor import CLOCK_STEP_S, START_LIMIT_S, Child, Group, Service, Supervisor
from tasks.contracts.hardware import read_classes
from tasks.contracts.serving import address_file, address_files, is_live, is_served, live_addresses
from tasks.control.leases.devices import Host, hardware_classes
from tasks.kernel.errors import ConfigurationError, NotRunningError, TransientError
from tasks.kernel.files import is_held, machine_id, make_folder, private_folder, write_atomically
from tasks.kernel.keys.address import TOKEN_FILE
from tasks.kernel.process import attempts
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.metadata.identity import not_shared, state_identity
from tasks.registry.connection import ADDRESS

LOGGER = logging.getLogger(__name__)

SERVER, MLFLOW, DEPLOYING = "prefect", "mlflow", "deploying"
RECOVERY, GATEWAY, AUTHORIZER = "recovery", "gateway", "authorizer"
WORKER = "worker-"
"""What the name of a worker has before that of its pool."""
STOPPED = "the platform was stopped"
REPLACED_POLL_S = 0.2
SUPERVISED = Path("serving") / "replicas"
"""Files of the supervisor of `supervise_serving`."""
MEMBERS = r"cluster\.http-stable\.membership_(healthy|total)"
Value = TypeVar("Value")
DRAIN_S = 1.5
"""The gateway sees within half a second that a serving process is not ready any more."""
WORKER_QUERY_S = 2
"""A waiting run starts within this; each question costs the server some milliseconds."""
HEARTBEAT_S = 30
"""Prefect's least: a dead run is found after three missing heartbeats."""

STORES = {
    DATABASE_URL: "postgresql://user:password@host/database",
    REDIS_URL: "redis://user:password@host:6379/0",
}
"""Variables with the addresses of the profile `server`, each with an example."""
OTHER_NAMES = {"postgresql": ("postgres",), "redis": ("rediss",)}


@dataclass(frozen=True)
class Plan:
    """All that the services of one platform are made from.

    Attributes:
        environment: what the supervisor was started with.
        classes: hardware classes of this machine; each has a work pool of its name.
        has_authorizer: people come through the gateway's listener `platform`. MLflow then has a
            password of its own, which the authorizer alone knows.
        code: commit or release that it was started from, whatever is checked out later.
    """

    files: PlatformFiles
    config: PlatformConfig
    ports: dict[str, int]
    password: str | None
    environment: Mapping[str, str]
    classes: tuple[str, ...]
    has_authorizer: bool = False
    code: str = field(default_factory=code_commit)

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools that have a worker here."""
        return (COORDINATOR, *self.classes)

    @property
    def api(self) -> PrefectApi:
        """Prefect's API, as the supervisor asks it: it must not wait for long."""
        return PrefectApi(self.endpoint.api_url, self.password, PROBE_TIMEOUT_S)

    @property
    def endpoint(self) -> Endpoint:
        """Where all answers; the inference server on loopback, behind the gateway."""
        config, host = self.config, _local(self.config.host)
        local = {service: f"http://{host}:{port}" for service, port in self.ports.items()}
        return Endpoint(
            api_url=f"{local['prefect']}/api",
            ui_url=(config.public_api_url or local["prefect"]).removesuffix("/api"),
            mlflow_url=(config.public_mlflow_url or local["mlflow"]).rstrip("/"),
            local_mlflow_url=local["mlflow"],
            pid=os.getpid(),
            profile=config.profile,
            serving_url=f"http://127.0.0.1:{self.ports['serving']}" if config.serving else None,
            code=self.code,
        )


def make_services(plan: Plan) -> list[Service]:
    """All services, in the order of their start.

    Raises:
        ConfigurationError: the profile `server` lacks an address.
    """
    # Deploying starts with the server: reading all that is to be deployed takes as long.
    deploy = ("-m", *plan.config.deploying.split(), "--wait", f"{START_LIMIT_S:g}")
    workers, recovery = worker_environment(plan), (sys.executable, "-m", "flows.recovery")
    found = [
        prefect_service(plan),
        mlflow_service(plan),
        Service(DEPLOYING, (sys.executable, *deploy), workers, once=True),
        *(worker_service(plan, pool) for pool in plan.pools if plan.config.rule(pool).least),
        # Looks for lost runs and repairs them.
        Service(RECOVERY, recovery, workers, needs=(SERVER, DEPLOYING)),
    ]
    if plan.config.serving:
        found.append(serving_service(plan))
    home = plan.files.home
    if plan.config.openbao:
        found.insert(0, openbao_service(plan))
    if GatewayFiles(home).config_file.is_file():  # its owner has described one
        found += gateway_services(plan)
    return found


def gateway_services(plan: Plan) -> list[Service]:
    """Envoy; and the authorizer, where the gateway has the platform behind it too."""
    home, environment = plan.files.home, base_environment(plan.environment)
    folder = GatewayFiles(home).folder
    line = (sys.executable, "-m", "falaj", "--home", str(home), "gateway")
    envoy = Service(GATEWAY, (*line, "run"), environment, probe=lambda _: Admin(folder).is_ready())
    if not plan.has_authorizer:
        return [envoy]
    admin = Admin(folder, AUTHORIZER_SOCKET)
    authorizer = (*line, "authorizer")
    return [envoy, Service(AUTHORIZER, authorizer, environment, probe=lambda _: admin.is_ready())]


def openbao_service(plan: Plan) -> Service:
    """OpenBao; it is up when it is set up too."""
    files, host, port = openbao.OpenBaoFiles(plan.files.home), plan.config.host, plan.ports[OPENBAO]
    url = f"https://{_local(host)}:{port}"
    is_set_up: set[datetime] = set()

    def are_well(started: datetime) -> bool:
        if started not in is_set_up:
            openbao.set_up(files, url, plan.config.sign_in_urls)
            is_set_up.add(started)
        return openbao.is_well(files)

    return Service(
        OPENBAO,
        openbao.command(files),
        base_environment(plan.environment),
        probe=lambda started: bool(_tried(lambda: are_well(started))),
        before_start=lambda: openbao.prepare(files, host, port, url),
    )


def _openbao_token(plan: Plan, name: str) -> dict[str, str]:
    """The least rights for what a service does, where the platform runs OpenBao."""
    if not plan.config.openbao:
        return {}
    return {TOKEN_FILE: str(openbao.OpenBaoFiles(plan.files.home).secrets / name)}


def prefect_service(plan: Plan) -> Service:
    """Prefect's server with its scheduler and all other services."""
    environment = {
        **base_environment(plan.environment),
        **server_settings("every", "platform"),
        **_server_stores(plan),
        "PREFECT_HOME": str(plan.files.prefect),
        "PREFECT_API_URL": plan.endpoint.api_url,
        "PREFECT_SERVER_UI_API_URL": f"{plan.endpoint.ui_url}/api",
        "PREFECT_UI_URL": plan.endpoint.ui_url,
    }
    if plan.password:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = plan.password
    return Service(
        SERVER,
        server_command("create_prefect", plan.config.host, plan.ports["prefect"]),
        environment,
        probe=lambda _: plan.api.can_write(),
    )


def mlflow_service(plan: Plan) -> Service:
    """MLflow over the registry that the flows write, behind the platform's password."""
    home = {"FALAJ_HOME": str(plan.files.home), "FALAJ_FEATURE_REPO": str(plan.files.home)}
    settings = Settings.from_environment({**plan.environment, **home})
    where = settings.location.url if settings.location else settings.home.as_uri()
    environment = {
        **base_environment(plan.environment),
        **_access_to_state(plan),
        "_MLFLOW_SERVER_FILE_STORE": settings.mlflow_uri,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": ADDRESS,
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"{where}/mlflow/artifacts",
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(_names(plan)),
        "DO_NOT_TRACK": "1",
        REPORTS_HOME: str(plan.files.home),
    }
    if plan.password:
        environment[MLFLOW_PASSWORD] = plan.password
        if plan.has_authorizer:
            environment[MLFLOW_PASSWORD] = ensure_password(plan.files, MLFLOW_SECRET)[0]
    return Service(
        MLFLOW,
        server_command("create_mlflow", plan.config.host, plan.ports["mlflow"]),
        environment,
        probe=lambda _: answers(f"{plan.endpoint.local_mlflow_url}/health"),
        before_start=lambda: make_folder(settings.mlflow_artifacts),
    )


def _access_to_state(plan: Plan) -> dict[str, str]:
    """Address and keys of S3, where the state is there."""
    if not plan.environment.get("FALAJ_STATE", "").startswith("s3:"):
        return {}
    return {name: value for name, value in plan.environment.items() if name.startswith("AWS_")}


def worker_service(plan: Plan, pool: str, number: int = 0) -> Service:
    """A process worker on one pool; it never makes the pool, since deploying describes it."""
    name = plan.files.worker_name(pool) + numbered(number)
    return Service(
        f"{WORKER}{pool}{numbered(number)}",
        _worker_command(pool, name),
        worker_environment(plan),
        probe=_heard_of(plan, pool, name),
        restart_when_silent=False,
        needs=(SERVER, DEPLOYING, *([OPENBAO] if plan.config.openbao else [])),
        # No process of an earlier worker lives, so its unfinished runs have been cut off.
        before_start=lambda: end_cut_off(plan.api, {pool: name}, "its worker was killed"),
    )


def _worker_command(pool: str, name: str) -> tuple[str, ...]:
    start = (sys.executable, "-m", "infra.orchestration.worker", "process")
    return (*start, "--pool", pool, "--name", name, "--no-create-pool-if-not-found")


def numbered(number: int) -> str:
    """What the name of a member of a group ends with; the first one has the group's own."""
    return f"-{number}" * bool(number)


def serving_service(plan: Plan, number: int = 0) -> Service:
    """The inference server; it lives before a model is registered, and takes it up then.

    It inherits what says where stores are (`FALAJ_...`), but no address of Prefect. Behind a
    gateway it is drained before it ends.

    Args:
        number: of the process, where there are several; each keeps its ports.
    """
    names = (SERVING + numbered(number), f"{SERVING}_grpc{numbered(number)}")
    port, grpc_port = (str(plan.ports.setdefault(name, free_port())) for name in names)
    listen = ["--http-port", port, "--grpc-port", grpc_port, "--replica", str(number)]
    if GatewayFiles(plan.files.home).config_file.is_file():
        listen += ["--drain-s", f"{DRAIN_S:g}"]
    stores = {
        name: value
        for name, value in plan.environment.items()
        if name.startswith("FALAJ_") and name not in STORES
    }
    return Service(
        names[0],
        (sys.executable, "-m", "serving", *listen, "--admin-port", "0"),
        {
            **base_environment(plan.environment),
            **_access_to_state(plan),
            **stores,
            **_openbao_token(plan, SERVING),
            "FALAJ_HOME": str(plan.files.home),
        },
        probe=lambda _: is_live(address_file(plan.files.home, number)),
    )


def worker_environment(plan: Plan) -> dict[str, str]:
    """What workers, and with them flows, see: all but Prefect's own and the servers' addresses."""
    api_url = plan.config.api_url or plan.api.url
    client = client_settings(plan.files.home, api_url, plan.password, plan.endpoint.ui_url)
    return _of_worker({**plan.environment, **_openbao_token(plan, "worker")}, client)


def _of_worker(environment: Mapping[str, str], client: dict[str, str]) -> dict[str, str]:
    """Environment of a worker, from its machine's and the settings of all clients."""
    del client["PREFECT_LOGGING_SETTINGS_PATH"]  # a worker's own lines are worth keeping
    inherited = {
        name: value
        for name, value in environment.items()
        if not name.startswith("PREFECT_") and name not in STORES
    }
    return {
        **inherited,
        **client,
        "PATH": path_to_python(environment),
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_S),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
    }


def become_worker(pool: str, settings: Settings, environment: Mapping[str, str]) -> None:
    """Be a worker of a platform on another machine; returns only where that must not be.

    Args:
        pool: of the platform.
        settings: of this machine.
        environment: `PREFECT_API_URL`, and `PREFECT_API_AUTH_STRING` where the platform has a
            password.

    Raises:
        ConfigurationError: this machine works on another state than the platform, is not of the
            pool's hardware class or does not know it, or nothing is deployed to the pool.
        TransientError: the platform does not answer.
    """
    api, password = environment.get("PREFECT_API_URL"), environment.get("PREFECT_API_AUTH_STRING")
    if not api:
        raise ConfigurationError(
            "PREFECT_API_URL is not set; expected the address of the platform's Prefect server, "
            "such as https://falaj.example.org/api. Nothing was started"
        )
    classes = read_classes(settings.home, environment)
    if pool not in (COORDINATOR, *classes):
        raise ConfigurationError(
            f"nothing on this machine describes the hardware class {pool!r}; described are "
            f"{', '.join(classes)}. Copy hardware.yaml from the platform's state folder to "
            f"{settings.home}, or name another pool. Nothing was started"
        )
    if pool in classes and (lacking := Host.this().lacks(classes[pool].requires)):
        raise ConfigurationError(
            f"this machine is not of hardware class {pool!r}: {'; '.join(lacking)}. Name the pool "
            "of a class that it has, or describe one in hardware.yaml. Nothing was started"
        )
    seen, expected = state_identity(settings), PrefectApi(api, password).expected_state(pool)
    if expected is None:
        raise ConfigurationError(
            f"the platform at {api} has deployed nothing to the pool {pool!r}, so nothing says "
            "which state it works on; run `falaj deploy` there, or name another pool. Nothing was "
            "started"
        )
    if seen != expected:
        raise ConfigurationError(not_shared(seen, expected, settings))
    name = f"{pool}-{socket.gethostname()}-{machine_id(settings.home).replace('.', '')}"
    words, client = _worker_command(pool, name), client_settings(settings.home, api, password)
    make_folder(Path(client["PREFECT_HOME"]))
    os.execve(words[0], words, _of_worker(environment, client))


def path_to_python(environment: Mapping[str, str]) -> str:
    """The search path on which the pools' command, `python`, is the one of this environment."""
    return f"{os.path.dirname(sys.executable)}{os.pathsep}{environment.get('PATH', os.defpath)}"


def store_url(variable: str, config: PlatformConfig, environment: Mapping[str, str]) -> str | None:
    """Address of PostgreSQL or Redis in the profile `server`; None in the embedded one.

    Raises:
        ConfigurationError: it is missing or of another kind.
    """
    if config.profile == "embedded":
        return None
    url, example = environment.get(variable, ""), STORES[variable]
    kind = example.partition("://")[0]
    if urlsplit(url).scheme.partition("+")[0] not in (kind, *OTHER_NAMES[kind]):
        raise ConfigurationError(f"profile server needs an address: set {variable} to {example}")
    return url


def for_asyncpg(url: str) -> str:
    """PostgreSQL's URL as Prefect takes it: with its driver, and the driver's word for TLS."""
    parts = urlsplit(url)
    query = [
        ("ssl" if name == "sslmode" else name, value) for name, value in parse_qsl(parts.query)
    ]
    return urlunsplit(parts._replace(scheme="postgresql+asyncpg", query=urlencode(query)))


def has_prefect_redis() -> bool:
    """True where events, leases and their order can be kept in Redis."""
    return importlib.util.find_spec("prefect_redis") is not None


def _server_stores(plan: Plan) -> dict[str, str]:
    database, redis = (store_url(name, plan.config, plan.environment) for name in STORES)
    if database is None or redis is None:
        file = plan.files.prefect / "prefect.db"
        return {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{file}"}
    stores = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": for_asyncpg(database),
        "PREFECT_SERVER_DOCKET_URL": redis,
    }
    if has_prefect_redis():
        stores |= {**server_settings("redis"), "PREFECT_REDIS_MESSAGING_URL": redis}
    return stores


def _heard_of(plan: Plan, pool: str, name: str) -> Callable[[datetime], bool]:
    """A probe: the server has heard of this worker since its start, and not long ago."""

    def probe(started: datetime) -> bool:
        try:
            workers = plan.api.workers(pool)
        except (TransientError, ConfigurationError):
            return False
        own = [each for each in workers if (each["name"], each["status"]) == (name, "ONLINE")]
        return any(datetime.fromisoformat(each["last_heartbeat_time"]) >= started for each in own)

    return probe


def _local(host: str) -> str:
    """An address of this machine on which a server with this `host` answers."""
    every = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return every.get(host) or (f"[{host}]" if ":" in host else host)


def _names(plan: Plan) -> list[str]:
    """Names by which a browser may ask for MLflow; others are refused (DNS rebinding)."""
    public = urlsplit(plan.endpoint.mlflow_url).hostname or ""
    hosts = {"localhost", _local(plan.config.host), public}
    return sorted([*hosts, *(f"{host}:*" for host in hosts)])


def supervise(files: PlatformFiles) -> None:
    """Run the platform until a stop signal.

    Its configuration is the file of FALAJ_PLATFORM_CONFIG, else the one that `up` has stored;
    without both, the default.

    Raises:
        ConfigurationError: another supervisor lives, the configuration is wrong, or the profile
            lacks an address.
    """
    private_folder(files.folder)
    private_folder(files.prefect)
    with only_supervisor(files):
        form = "%(asctime)s  %(levelname)-7s %(message)s"
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=form)
        files.endpoint.unlink(missing_ok=True)
        if chosen := os.environ.get(CONFIG_VARIABLE):
            config = read_config(Path(chosen), {})
            write_atomically(files.config, config.model_dump_json(indent=1))
        config = stored_config(files)
        plan = Plan(
            files=files,
            config=config,
            ports=choose_ports(config, files),
            password=ensure_password(files)[0] if config.password else None,
            environment=dict(os.environ),
            classes=hardware_classes(files.home),
            has_authorizer=has_platform_listener(files.home),
        )
        try:
            make_supervisor(plan).run()
        finally:
            files.endpoint.unlink(missing_ok=True)


def make_supervisor(plan: Plan) -> Supervisor:
    """The supervisor of all services: workers end first when it stops, then what they need."""
    api, files = plan.api, plan.files
    is_paused = files.paused.exists()  # what `down` pauses later stays paused
    state = read_state(files)
    children = [_child(plan, service) for service in make_services(plan)]
    groups = make_groups(plan, children)

    def on_up(name: str) -> None:
        nonlocal is_paused
        if name == SERVER:
            write_endpoint(plan)
        if is_paused and files.endpoint.exists():
            is_paused = _tried(lambda: resume_pools(api, files)) is None

    def after_workers() -> list[CutRun]:
        most = max(group.rule.most for group in groups.values())
        names = [{p: files.worker_name(p) + numbered(n) for p in plan.pools} for n in range(most)]
        return (
            _tried(lambda: [run for one in names for run in end_cut_off(api, one, STOPPED)]) or []
        )

    return Supervisor(
        files=files,
        children=children,
        servers=frozenset({SERVER, MLFLOW, OPENBAO}),
        after_workers=after_workers,
        groups=groups,
        on_up=on_up,
        planner=SERVER,
        forget_plans=lambda: _tried(lambda: api.forget_planned(now().isoformat())) is not None,
        # A clock that was set back since the platform ran last, as after a power cut.
        plans_are_wrong=state is not None
        and (state.written - now()).total_seconds() >= CLOCK_STEP_S,
    )


def make_groups(plan: Plan, children: Sequence[Child]) -> dict[str, Group]:
    """What may be there several times: serving processes, and the workers of each pool.

    Raises:
        ConfigurationError: the configuration scales something that is not here.
    """
    groups = {pool: worker_group(plan, pool) for pool in plan.pools}
    if plan.config.serving:
        groups[SERVING] = serving_group(plan)
    if unknown := sorted(plan.config.scaling.keys() - groups.keys()):
        raise ConfigurationError(
            f"scaling names {', '.join(unknown)}, which this machine does not run; expected of "
            f"{', '.join(groups)}. Nothing was started"
        )
    for child in children:
        if group := groups.get(child.service.name.removeprefix(WORKER)):
            group.members[0] = child
    return groups


def worker_group(plan: Plan, pool: str) -> Group:
    """The workers of a pool."""

    def measure(members: Sequence[Child]) -> Load | None:
        """By runs due or in progress. A loop asks for none before it sees a worker: one stays."""
        try:
            due, active = demand(plan.api, pool)
            loops = 0 if pool == COORDINATOR else num_running_loops(plan.api)
        except (TransientError, ConfigurationError):
            return None
        waiting = max(due + active, min(loops, 1))
        return Load(len(members), _num_up(members), waiting, is_held=active > 0)

    rule = plan.config.rule(pool)
    return Group(rule, lambda n: _child(plan, worker_service(plan, pool, n)), measure)


def serving_group(plan: Plan) -> Group:
    """The serving processes."""
    home, known = plan.files.home, dict[int, psutil.Process]()
    for file in address_files(home):
        if not is_live(file):  # of a process that was killed
            file.unlink()

    def measure(members: Sequence[Child]) -> Load | None:
        """By the pages of the processes and the CPU they use."""
        live = live_addresses(home)
        pids = [int(one["pid"] or 0) for one in live]
        try:
            pages = [_status(home, str(one["admin"])) for one in live]
            used = [known.setdefault(pid, psutil.Process(pid)).cpu_percent() for pid in pids]
        except (OSError, ValueError, httpx.HTTPError, psutil.Error):  # one ends, or is silent
            return None
        times = [v["p99_ms"] or 0.0 for p in pages for m in p["models"] for v in m["versions"]]
        waiting = sum(page["queued_requests"] for page in pages)
        busy = sum(used) / len(used) / 100 if used else None
        return Load(len(members), _num_up(members), waiting, busy, max(times, default=None))

    def are_found() -> bool:
        """Whether the gateway finds all servers well; True where none runs on this machine."""
        try:
            numbers = Admin(GatewayFiles(home).folder).stats(MEMBERS).values()
        except TransientError:
            return True
        return len({*numbers}) == 1 and min(numbers) >= len(live_addresses(home))

    rule = plan.config.rule(SERVING)
    return Group(rule, lambda n: _child(plan, serving_service(plan, n)), measure, are_found)


def _child(plan: Plan, service: Service) -> Child:
    return Child(service, plan.files.log(service.name))


def _num_up(members: Sequence[Child]) -> int:
    return sum(child.condition == "up" for child in members)


def _status(home: Path, admin: str) -> Any:
    token = (home / "serving" / "secrets" / "admin-token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    page = http_client().get(f"{admin}/status.json", headers=headers, timeout=PROBE_TIMEOUT_S)
    return page.raise_for_status().json()


def supervise_serving(home: Path, config: PlatformConfig) -> None:
    """Keep the serving processes alive until a stop signal, without a platform.

    Raises:
        ConfigurationError: something serves from the state folder already.
    """
    files = PlatformFiles(home, home / SUPERVISED)
    private_folder(files.folder)
    with only_supervisor(files):
        if is_served(home):
            raise ConfigurationError(
                f"another process serves from {home}; end it first (falaj serve stop), or let the "
                "platform start several (falaj up --serving-replicas). Nothing was started"
            )
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
        plan = Plan(files, config, choose_ports(config, files), None, os.environ, ())
        groups = {SERVING: serving_group(plan)}
        Supervisor(files, [], frozenset(), list, on_up=lambda _: None, groups=groups).run()


def replace_serving(home: Path, limit_s: float) -> int:
    """Have the serving processes replaced one by one; how many they were.

    Raises:
        NotRunningError: no supervisor runs them.
        TransientError: not all were replaced in time; it goes on.
    """
    supervisors = (PlatformFiles(home), PlatformFiles(home, home / SUPERVISED))
    pid = next((supervisor_pid(files) for files in supervisors if is_held(files.lock)), None)
    if pid is None:
        reason = f"nothing supervises serving processes on {home}; end and start it by itself"
        raise NotRunningError(f"{reason}. Nothing was changed")
    before = {one["pid"] for one in live_addresses(home)}
    os.kill(pid, signal.SIGUSR1)
    for _ in attempts(limit_s, REPLACED_POLL_S):
        live = {one["pid"] for one in live_addresses(home)}
        if not before & live and len(live) >= len(before):
            return len(before)
    left = f"{len(before & live)} of {len(before)} serving processes are not replaced"
    raise TransientError(f"{left} after {limit_s:g} s; it goes on. falaj serve status")


def _tried(ask: Callable[[], Value]) -> Value | None:
    """What the server was asked for; None where it did not answer."""
    try:
        return ask()
    except (TransientError, ConfigurationError) as exc:
        LOGGER.warning("not done: %s", exc)
        return None


def resume_pools(api: PrefectApi, files: PlatformFiles) -> list[str]:
    """Let the pools hand out runs again that `down` had paused; returns their names.

    Raises:
        TransientError: the server does not answer; those that are still paused stay noted.
    """
    pools = paused_pools(files)
    for pool in pools:
        with suppress(NotFoundError):  # deleted meanwhile
            api.pause_pool(pool, paused=False)
    files.paused.unlink(missing_ok=True)
    return pools


def write_endpoint(plan: Plan) -> None:
    """Publish for commands where the platform answers."""
    write_atomically(plan.files.endpoint, plan.endpoint.model_dump_json(indent=1))
