"""The services of the platform: their commands, environments and probes, for each profile."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from infra.gateway.service import edge_service, has_edge
from infra.orchestration.client import client_settings
from infra.platform.api import PROBE_TIMEOUT_S, PrefectApi, answers
from infra.platform.children import START_LIMIT_S, Service
from infra.platform.config import COORDINATOR, DATABASE_URL, REDIS_URL, Place, PlatformConfig
from infra.platform.cut_off import end_cut_off
from infra.platform.mlflow_app import HOME_VARIABLE
from infra.platform.ports import Ports, listens
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.settings import Settings, make_folder

SERVER, MLFLOW, DEPLOYING, SERVING = "prefect", "mlflow", "deploying", "serving"
RECOVERY = "recovery"

BASE_VARIABLES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}
    | {"LD_PRELOAD"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"http_proxy", "https_proxy", "no_proxy"}
)
"""What a server inherits: nothing that may hold a secret of somebody else."""

SERVER_SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "15",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "30",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "DO_NOT_TRACK": "1",
}
"""Without these leases outlive their holders, each task run costs five times as much, and the
database grows for ever. The three loops, by default of 5 s, look for what is minutes late."""

REDIS_MODULES = {
    "PREFECT_MESSAGING_BROKER": "prefect_redis.messaging",
    "PREFECT_MESSAGING_CACHE": "prefect_redis.messaging",
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
}
"""What prefect-redis, where it is installed, keeps in Redis."""


@dataclass(frozen=True)
class Plan:
    """All that the services of one platform are made from.

    Attributes:
        environment: what the supervisor was started with.
        classes: hardware classes of this machine; each has a work pool of its name.
    """

    place: Place
    config: PlatformConfig
    ports: Ports
    password: str | None
    environment: Mapping[str, str]
    classes: tuple[str, ...]

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools that have a worker here."""
        return (COORDINATOR, *self.classes)

    @property
    def local_url(self) -> str:
        """Prefect's address for processes of this machine."""
        return f"http://{_local(self.config.host)}:{self.ports.prefect}"

    @property
    def api(self) -> PrefectApi:
        """Prefect's API, as the supervisor asks it: it must not wait for long."""
        return PrefectApi(f"{self.local_url}/api", self.password, PROBE_TIMEOUT_S)

    @property
    def ui_url(self) -> str:
        """Prefect's address for people; what links in messages and artifacts begin with."""
        if self.config.public_api_url:
            return self.config.public_api_url.removesuffix("/api")
        return self._public_url(self.ports.prefect)

    @property
    def mlflow_url(self) -> str:
        """MLflow's address for people."""
        given = self.config.public_mlflow_url
        return given.rstrip("/") if given else self._public_url(self.ports.mlflow)

    @property
    def local_mlflow_url(self) -> str:
        """MLflow's address for processes of this machine."""
        return f"http://{_local(self.config.host)}:{self.ports.mlflow}"

    @property
    def serving_url(self) -> str:
        """The inference server's address; it listens on loopback, the edge stands before it."""
        return f"http://127.0.0.1:{self.ports.serving}"

    def _public_url(self, port: int) -> str:
        return f"http://{self.config.public_host or _local(self.config.host)}:{port}"


def make_services(plan: Plan) -> list[Service]:
    """All services, in the order of their start.

    Raises:
        ConfigurationError: the profile `server` lacks an address.
    """
    found = [prefect_service(plan), mlflow_service(plan), deploying_service(plan)]
    found += [worker_service(plan, pool) for pool in plan.pools]
    found.append(recovery_service(plan))
    found += [serving_service(plan)] if plan.config.serving else []
    if has_edge(plan.place.home):
        found.append(edge_service(plan.place.home, base_environment(plan.environment)))
    return found


def prefect_service(plan: Plan) -> Service:
    """Prefect's server with its scheduler and all other services."""
    command = _uvicorn(
        "infra.platform.prefect_app:create_app", plan.config.host, plan.ports.prefect
    )
    environment = {
        **base_environment(plan.environment),
        **SERVER_SETTINGS,
        **_server_stores(plan),
        "PREFECT_HOME": str(plan.place.prefect),
        "PREFECT_API_URL": f"{plan.local_url}/api",
        "PREFECT_SERVER_UI_API_URL": f"{plan.ui_url}/api",
        "PREFECT_UI_URL": plan.ui_url,
    }
    if plan.password:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = plan.password
    return Service(
        name=SERVER,
        command=command,
        environment=environment,
        probe=lambda _: plan.api.can_write(),
        restart_when_silent=True,
    )


def mlflow_service(plan: Plan) -> Service:
    """MLflow over the registry that the flows write, behind the platform's password."""
    settings = Settings(home=plan.place.home, feature_repo=plan.place.home)
    environment = {
        **base_environment(plan.environment),
        "_MLFLOW_SERVER_FILE_STORE": settings.mlflow_uri,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(settings.mlflow_artifacts),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(_names(plan)),
        "DO_NOT_TRACK": "1",
        HOME_VARIABLE: str(plan.place.home),
    }
    if plan.password:
        environment["FALAJ_MLFLOW_PASSWORD"] = plan.password
    return Service(
        name=MLFLOW,
        command=_uvicorn(
            "infra.platform.mlflow_app:create_app", plan.config.host, plan.ports.mlflow
        ),
        environment=environment,
        probe=lambda _: answers(f"{plan.local_mlflow_url}/health"),
        restart_when_silent=True,
        before_start=lambda: make_folder(settings.mlflow_artifacts),
    )


def deploying_service(plan: Plan) -> Service:
    """Makes pools, deployments and automations, once after each start.

    It is started with the server: reading all that is to be deployed takes as long as its start.
    """
    return Service(
        name=DEPLOYING,
        command=(sys.executable, "-m", plan.config.deploying, "--wait", f"{START_LIMIT_S:g}"),
        environment=worker_environment(plan),
        once=True,
    )


def worker_service(plan: Plan, pool: str) -> Service:
    """A process worker on one pool; it never makes the pool, since deploying describes it."""
    name = plan.place.worker_name(pool)
    start = (sys.executable, "-m", "prefect", "worker", "start", "--type", "process")
    return Service(
        name=f"worker-{pool}",
        command=(*start, "--pool", pool, "--name", name, "--no-create-pool-if-not-found"),
        environment=worker_environment(plan),
        probe=_heard_of(plan, pool, name),
        needs=(SERVER, DEPLOYING),
        before_start=lambda: _end_what_is_left(plan, pool),
    )


def recovery_service(plan: Plan) -> Service:
    """Looks for lost runs and repairs them."""
    return Service(
        name=RECOVERY,
        command=(sys.executable, "-m", "flows.recovery_watch"),
        environment=worker_environment(plan),
        needs=(SERVER, DEPLOYING),
    )


def serving_service(plan: Plan) -> Service:
    """The inference server; it lives before a model is registered, and takes it up then.

    It inherits what says where stores are (`FALAJ_...`), but no address of Prefect.
    """
    ports = ("--http-port", str(plan.ports.serving), "--grpc-port", str(plan.ports.serving_grpc))
    stores = {
        name: value
        for name, value in plan.environment.items()
        if name.startswith("FALAJ_") and name not in (DATABASE_URL, REDIS_URL)
    }
    return Service(
        name=SERVING,
        command=(sys.executable, "-m", "serving", *ports, "--admin-port", "0"),
        environment={
            **base_environment(plan.environment),
            **stores,
            "FALAJ_HOME": str(plan.place.home),
        },
        probe=lambda _: listens(plan.ports.serving),
        restart_when_silent=True,
    )


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What every server inherits."""
    return {
        name: value
        for name, value in environment.items()
        if name in BASE_VARIABLES or name.startswith("LC_")
    }


def worker_environment(plan: Plan) -> dict[str, str]:
    """What workers, and with them flows, see: all but Prefect's own and the servers' addresses."""
    inherited = {
        name: value
        for name, value in plan.environment.items()
        if not name.startswith("PREFECT_") and name not in (DATABASE_URL, REDIS_URL)
    }
    client = client_settings(plan.place.home, plan.api.url, plan.password, plan.ui_url)
    del client["PREFECT_LOGGING_SETTINGS_PATH"]  # a worker's own lines are worth keeping
    return {
        **inherited,
        **client,
        "PREFECT_WORKER_QUERY_SECONDS": f"{plan.config.worker_query_s:g}",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(plan.config.heartbeat_s),
    }


def database_url(config: PlatformConfig, environment: Mapping[str, str]) -> str | None:
    """PostgreSQL's URL of the profile `server`; None in the embedded one.

    Raises:
        ConfigurationError: it is missing or of another kind.
    """
    if config.profile == "embedded":
        return None
    url = _given(DATABASE_URL, config.database_url_file, environment)
    if not url or urlsplit(url).scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise ConfigurationError(
            f"profile server needs the URL of a PostgreSQL database in {DATABASE_URL}, or in the "
            "file that database_url_file names: postgresql://user:password@host/database"
        )
    return url


def redis_url(config: PlatformConfig, environment: Mapping[str, str]) -> str | None:
    """Redis' URL of the profile `server`; None in the embedded one.

    Raises:
        ConfigurationError: it is missing or of another kind.
    """
    if config.profile == "embedded":
        return None
    url = _given(REDIS_URL, config.redis_url_file, environment)
    if not url or urlsplit(url).scheme not in ("redis", "rediss"):
        raise ConfigurationError(
            f"profile server needs the URL of a Redis in {REDIS_URL}, or in the file that "
            "redis_url_file names: redis://user:password@host:6379/0"
        )
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
    database = database_url(plan.config, plan.environment)
    redis = redis_url(plan.config, plan.environment)
    if database is None or redis is None:
        file = plan.place.prefect / "prefect.db"
        return {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{file}"}
    stores = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": for_asyncpg(database),
        "PREFECT_SERVER_DOCKET_URL": redis,
    }
    if has_prefect_redis():
        stores |= {**REDIS_MODULES, "PREFECT_REDIS_MESSAGING_URL": redis}
    return stores


def _given(variable: str, file: Path | None, environment: Mapping[str, str]) -> str | None:
    if found := environment.get(variable):
        return found
    if file is None:
        return None
    try:
        return file.read_text().strip()
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}") from exc


def _heard_of(plan: Plan, pool: str, name: str) -> Callable[[datetime], bool]:
    """A probe: the server has heard of this worker since its start, and not long ago."""

    def probe(started: datetime) -> bool:
        try:
            workers = plan.api.workers(pool)
        except (TransientError, ConfigurationError):
            return False
        return any(
            worker["name"] == name
            and worker["status"] == "ONLINE"
            and datetime.fromisoformat(worker["last_heartbeat_time"]) >= started
            for worker in workers
        )

    return probe


def _end_what_is_left(plan: Plan, pool: str) -> None:
    """No process of an earlier worker lives, so its unfinished runs have been cut off."""
    end_cut_off(plan.api, {pool: plan.place.worker_name(pool)}, "its worker was killed")


def _uvicorn(factory: str, host: str, port: int) -> tuple[str, ...]:
    command = (sys.executable, "-m", "uvicorn", "--factory", factory, "--host", host)
    return (*command, "--port", str(port), "--log-level", "warning", "--timeout-keep-alive", "30")


def _local(host: str) -> str:
    """An address of this machine on which a server with this `host` answers."""
    if host == "0.0.0.0":
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _names(plan: Plan) -> list[str]:
    """Names by which a browser may ask for MLflow; others are refused (DNS rebinding)."""
    public = (plan.config.public_host, urlsplit(plan.mlflow_url).hostname)
    hosts = {"localhost", _local(plan.config.host), *(name for name in public if name)}
    return sorted([*hosts, *(f"{host}:*" for host in hosts)])
