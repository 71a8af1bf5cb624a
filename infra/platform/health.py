"""`status`: what runs. `doctor`: everything the platform needs is checked; each fault with advice.

Nothing here changes anything.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict

from infra.orchestration.client import is_running, read_password
from infra.platform.api import PROBE_TIMEOUT_S, Json, PrefectApi, answers
from infra.platform.config import COORDINATOR, PlatformConfig, kept_options, stored_config
from infra.platform.files import (
    Endpoint,
    PlatformFiles,
    PlatformState,
    ServiceState,
    now,
    paused_pools,
    read_endpoint,
    read_state,
)
from infra.platform.services import MLFLOW, SERVER, database_url, has_prefect_redis, redis_url
from tasks.control.leases.devices import hardware_classes
from tasks.control.leases.repository import LeaseFacts, LeaseRepository
from tasks.control.recovery.config import RecoveryConfig
from tasks.kernel.errors import ConfigurationError, StorageError, TransientError
from tasks.kernel.files import lack_of_space, make_folder, shows_damage
from tasks.kernel.settings import Settings

EXIT_WELL, EXIT_DOWN, EXIT_NOT_RUNNING = 0, 1, 3
LATE_AFTER = timedelta(seconds=60)
GIVEN_UP_SHOWN = timedelta(days=1)

PROJECT = "falaj"
PINNED = ("prefect", "fastapi", "sqlalchemy")
"""Other versions of these stop the server, or its scheduler alone, with hardly a message."""

LEAST_FREE_INODES = 10_000
CLOCK_TOLERANCE_S = 5.0
CHECKED_BYTES = 2_000_000_000
MEMORY_LEASES = "lease_storage.memory"

Level = Literal["ok", "warning", "problem"]
SIGNS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


class PoolStatus(BaseModel):
    """A work pool, and how many of its workers are online, on any machine."""

    model_config = ConfigDict(frozen=True)

    name: str
    type: str
    paused: bool
    online: int


class Status(BaseModel):
    """The platform as it is now.

    Attributes:
        running: a supervisor lives.
        phase: what it is doing; `dead` where one was killed.
        leases: who holds devices and who waits for them, on all hosts that share the database.
        options: with which it runs, or ran last; later starts have them too.
        wrong: one sentence for each thing that is not well.
    """

    model_config = ConfigDict(frozen=True)

    running: bool
    phase: str
    home: Path
    options: dict[str, str] = {}
    endpoint: Endpoint | None = None
    services: tuple[ServiceState, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    leases: tuple[LeaseFacts, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all well, 1 something is down, 3 not running."""
        if not self.running:
            return EXIT_NOT_RUNNING
        return EXIT_DOWN if self.wrong else EXIT_WELL


def read_status(files: PlatformFiles) -> Status:
    """Read the supervisor's files, and query the servers themselves."""
    state = read_state(files)
    leases, troubles = _leases(files)
    status = Status(
        running=is_running(files.home),
        phase=state.phase if state else "starting",
        home=files.home,
        options={name: str(value) for name, value in kept_options(files).items()},
        leases=leases,
    )
    if not status.running:
        phase = "dead" if state is not None and state.phase != "stopped" else "down"
        return status.model_copy(update={"phase": phase, "wrong": troubles})
    if state is None:
        return status.model_copy(update={"wrong": ("nothing has started yet",)})
    wrong = [
        f"{service.name} is {service.condition}"
        f"{': ' * bool(service.detail)}{service.detail}; its log is {files.log(service.name)}"
        for service in state.services
        if service.condition not in ("up", "done")
    ]
    endpoint = read_endpoint(files)
    pools, more = _pools(endpoint, files)
    if paused := paused_pools(files):
        wrong.append(
            f"going down has paused the pools {', '.join(paused)}, and their runs wait; make up "
            "resumes them"
        )
    if state.phase != "up":
        wrong.append(f"the platform is {state.phase}")
    found = {"endpoint": endpoint, "services": state.services, "pools": pools}
    return status.model_copy(update={**found, "wrong": (*wrong, *more, *troubles)})


def _leases(files: PlatformFiles) -> tuple[tuple[LeaseFacts, ...], tuple[str, ...]]:
    """The leases, and what is wrong with their table; reading makes no database."""
    settings = replace(Settings.from_environment(), home=files.home)
    if settings.database_url is None and not settings.metadata_file.exists():
        return (), ()
    try:
        return tuple(LeaseRepository(settings.metadata_url).facts()), ()
    except (TransientError, StorageError, ConfigurationError) as exc:
        return (), (f"the leases of devices cannot be read: {exc}",)


def _pools(
    endpoint: Endpoint | None, files: PlatformFiles
) -> tuple[tuple[PoolStatus, ...], list[str]]:
    """The pools as the server sees them, and what is wrong with them and with the servers."""
    if endpoint is None:
        return (), [f"{SERVER} has not answered yet"]
    wrong = []
    if not answers(f"{endpoint.local_mlflow_url}/health"):
        wrong.append(f"{MLFLOW} does not answer at {endpoint.local_mlflow_url}")
    api = PrefectApi(endpoint.api_url, read_password(files.folder), PROBE_TIMEOUT_S)
    try:
        pools = tuple(
            PoolStatus(
                name=pool["name"],
                type=pool["type"],
                paused=pool["is_paused"],
                online=len(_online(api, pool["name"])),
            )
            for pool in api.pools()
        )
        wrong += waiting_for_workers(api, [pool.name for pool in pools if not pool.online])
        wrong += given_up(api)
    except (TransientError, ConfigurationError) as exc:
        return (), [*wrong, str(exc)]
    return pools, wrong


def _online(api: PrefectApi, pool: str) -> list[str]:
    return [worker["name"] for worker in api.workers(pool) if worker["status"] == "ONLINE"]


def waiting_for_workers(api: PrefectApi, pools: Sequence[str]) -> list[str]:
    """Runs that are late because their pool has no worker; one sentence for each pool."""
    due_before = (now() - LATE_AFTER).isoformat()
    waiting: dict[str, list[Json]] = {}
    for run in api.waiting_runs(pools, due_before) if pools else ():
        waiting.setdefault(str(run["work_pool_name"]), []).append(run)
    return [
        f"{len(runs)} run{'s' * (len(runs) > 1)} of work pool {pool!r} "
        f"wait{'s' * (len(runs) == 1)} for a worker, and none is online: {first['name']} was due "
        f"{_age(datetime.fromisoformat(first['expected_start_time']))} ago. Start one on a machine "
        f"with the hardware: prefect worker start --pool {pool}"
        for pool, runs in sorted(waiting.items())
        for first in [min(runs, key=lambda run: str(run["expected_start_time"]))]
    ]


def given_up(api: PrefectApi) -> list[str]:
    """Runs that were cut off so often that nobody starts them again."""
    most = RecoveryConfig().max_retries + 1
    return [
        f"run {run['name']} was cut off {run['run_count']} times, last "
        f"{_age(datetime.fromisoformat(run['end_time']))} ago, and is not started again. Its log "
        f"shows what it was doing; to resume: python -m falaj --on-platform retry {run['name']}"
        for run in api.crashed_runs((now() - GIVEN_UP_SHOWN).isoformat())
        if run["run_count"] >= most
    ]


def table(status: Status) -> str:
    """The status for a person."""
    options, leases = _option_lines(status.options), _lease_lines(status.leases)
    if not status.running:
        remark = " It was killed; make up starts it again." if status.phase == "dead" else ""
        first = f"No platform runs on {status.home}.{remark}"
        return "\n".join([first, *options, *leases, *status.wrong])
    lines = [f"{'State':<12}{status.phase}, on {status.home}", *options]
    if at := status.endpoint:
        urls = {"Prefect": at.ui_url, "MLflow": at.mlflow_url, "Serving": at.serving_url}
        lines += [f"{name:<12}{url}" for name, url in urls.items() if url]
    lines += ["", f"{'Service':<24}{'Condition':<12}{'Since':<10}{'Restarts':>8}  Detail"]
    lines += [
        f"{service.name:<24}{service.condition:<12}{_age(service.since):<10}{service.restarts:>8}  "
        + (service.detail if len(service.detail) < 60 else service.detail[:57] + "...")
        for service in status.services
    ]
    if status.pools:
        lines += ["", f"{'Pool':<24}{'Workers online':<16}Hands out runs"]
    lines += [
        f"{pool.name:<24}{pool.online:<16}{'no, it is paused' if pool.paused else 'yes'}"
        for pool in status.pools
    ]
    return "\n".join([*lines, *leases, "", *(status.wrong or ("All is well.",))])


def _option_lines(options: Mapping[str, str]) -> list[str]:
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    line = f"{'Options':<12}{named}; kept for each start, dropped by make up UP_ARGS=--reset"
    return [line] if options else []


def _lease_lines(leases: Sequence[LeaseFacts]) -> list[str]:
    """Who holds what and who waits, host by host; nothing where nobody does."""
    header = f"{'Devices of':<24}{'State':<12}{'Since':<10}{'Priority':>8}  What, and for whom"
    lines = [
        f"{lease.host[:23]:<24}{lease.state:<12}{_age(lease.since):<10}{lease.priority:>8}  "
        f"{lease.devices}: {lease.holder}, process {lease.pid}"
        for lease in leases
    ]
    return ["", header, *lines] if lines else []


def _age(since: datetime) -> str:
    seconds = max(0.0, (now() - since).total_seconds())
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


@dataclass(frozen=True)
class Finding:
    """One thing checked.

    Attributes:
        name: what was checked.
        seen: what was found, and where it is wrong, what was expected.
        advice: what to do; empty where all is well.
    """

    name: str
    level: Level
    seen: str
    advice: str = ""


def examine(files: PlatformFiles, environment: Mapping[str, str]) -> list[Finding]:
    """All findings, of a platform that runs or of one that does not."""
    config, moment = stored_config(files), datetime.now(UTC)
    findings = check_pins(*installed_pins())
    if files.folder.exists():
        findings += [
            check_secret(files, config),
            check_private(files.home),
            *check_disk(files.home, config.min_free_bytes),
            check_writable(files.home / "artifacts"),
            check_clock(read_state(files), moment),
            *_check_stores(files, config, environment, moment),
        ]
    if not is_running(files.home):
        seen = f"no supervisor lives on {files.home}"
        return [*findings, Finding("platform", "problem", seen, "make up")]
    status = read_status(files)
    advice = "the supervisor restarts what has ended; its log and theirs show why"
    findings += [Finding("services", "problem", wrong, advice) for wrong in status.wrong]
    if not status.wrong:
        findings.append(Finding("services", "ok", f"all {len(status.services)} are up"))
    return findings + _check_server(files, moment)


def _check_stores(
    files: PlatformFiles, config: PlatformConfig, environment: Mapping[str, str], moment: datetime
) -> list[Finding]:
    settings = Settings(home=files.home, feature_repo=files.home)
    databases = [files.home / "operation" / "operation.db"]
    databases += [settings.mlflow_artifacts.parent / "mlflow.db"]
    if config.profile == "embedded":
        return check_databases([files.prefect / "prefect.db", *databases])
    findings = check_databases(databases)
    try:
        database, redis = database_url(config, environment), redis_url(config, environment)
    except ConfigurationError as exc:
        advice = "set them in this shell as for make up"
        return [*findings, Finding("stores", "warning", str(exc), advice)]
    assert database is not None
    assert redis is not None
    if not has_prefect_redis():
        seen = "prefect-redis is not installed: one server alone may use this database"
        advice = "install it before a second server is started; leases are kept in files until then"
        findings.append(Finding("stores", "warning", seen, advice))
    return [check_postgres(database, moment), check_redis(redis), *findings]


def _check_server(files: PlatformFiles, moment: datetime) -> list[Finding]:
    endpoint = read_endpoint(files)
    if endpoint is None:
        return [Finding("API", "problem", "the server has not answered yet", "wait, make status")]
    api = PrefectApi(endpoint.api_url, read_password(files.folder))
    findings = check_api(api)
    if findings[0].level != "ok":
        return findings
    try:
        own = (COORDINATOR, *hardware_classes())
        return [*findings, check_scheduler(api, moment), *check_workers(api, own)]
    except (TransientError, ConfigurationError) as exc:
        return [*findings, Finding("API", "problem", str(exc), "make status; make logs")]


def report(findings: list[Finding]) -> str:
    """The findings for a person, the faults with what to do."""
    lines = []
    for finding in findings:
        lines.append(f"{SIGNS[finding.level]}  {finding.name:<11}{finding.seen}")
        if finding.advice:
            lines.append(f"{'':<20}-> {finding.advice}")
    counts = []
    for level in ("problem", "warning"):
        number = sum(finding.level == level for finding in findings)
        counts.append(f"{number} {level}{'s' * (number != 1)}")
    return "\n".join([*lines, "", f"{', '.join(counts)}, {len(findings)} checks"])


def exit_code(findings: list[Finding]) -> int:
    """0 no problem, 1 at least one, 3 the only one is that no platform runs."""
    problems = [finding.name for finding in findings if finding.level == "problem"]
    if problems == ["platform"]:
        return EXIT_NOT_RUNNING
    return EXIT_DOWN if problems else EXIT_WELL


def check_pins(installed: Mapping[str, str], bounds: Mapping[str, Requirement]) -> list[Finding]:
    """Compare installed versions with those that the project allows."""
    return [
        Finding("pins", "ok", f"{name} {installed[name]}")
        if bound.specifier.contains(installed[name], prereleases=True)
        else Finding(
            "pins",
            "problem",
            f"{name} {installed[name]} is installed, expected {bound.specifier}; with other "
            "versions Prefect's server does not start, or never makes a scheduled run",
            "make setup, which installs the locked versions; then make down, make up",
        )
        for name, bound in bounds.items()
    ]


def installed_pins() -> tuple[dict[str, str], dict[str, Requirement]]:
    """Versions installed, and those that the project asks for, of what the server depends on."""
    asked = (Requirement(line) for line in requires(PROJECT) or ())
    bounds = {bound.name: bound for bound in asked if bound.name in PINNED}
    return {name: version(name) for name in bounds}, bounds


def check_secret(files: PlatformFiles, config: PlatformConfig) -> Finding:
    """The password's file is there, and nobody else can read it."""
    if not config.password:
        seen = "the platform runs without one: every user of this machine can run code through it"
        return Finding("password", "warning", seen, "make down, make up UP_ARGS=--password")
    try:
        mode = files.secret.stat().st_mode & 0o777
    except FileNotFoundError:
        seen = f"{files.secret} is missing, so no command reaches the platform"
        return Finding("password", "problem", seen, "make down, make up, which makes a new one")
    if mode & 0o077:
        seen = f"{files.secret} has mode {mode:o}, expected 600: others may have read it"
        advice = f"make down, delete {files.secret}, make up, which makes a new one"
        return Finding("password", "problem", seen, advice)
    return Finding("password", "ok", f"kept in {files.secret}, mode 600")


def check_private(home: Path) -> Finding:
    """Nobody else can read the data of the state folder."""
    mode = home.stat().st_mode & 0o777
    if mode & 0o077:
        seen = f"{home} has mode {mode:o}, expected 700: others may read data, models, predictions"
        return Finding("state", "warning", seen, f"chmod 700 {home}, if nobody else is to read it")
    return Finding("state", "ok", f"{home} is closed to others, mode 700")


def check_api(api: PrefectApi) -> list[Finding]:
    """The server answers, knows the password and is of the version installed here."""
    try:
        server, settings = api.version(), api.settings()
    except (ConfigurationError, TransientError) as exc:
        advice = "make status; its log is logs/prefect.log; for another password make down, make up"
        return [Finding("API", "problem", str(exc), advice)]
    findings = [Finding("API", "ok", f"{api.url} answers, with password: {bool(api.password)}")]
    here = version("prefect")
    seen = f"the server is Prefect {server}, installed here is {here}"
    advice = "make down, make up: server and clients must be equal"
    same = server == here
    findings.append(Finding("API", *(("ok", seen) if same else ("problem", seen, advice))))
    node: object = settings
    for name in ("server", "concurrency", "lease_storage"):
        node = node.get(name) if isinstance(node, Mapping) else None
    if MEMORY_LEASES in str(node):
        seen = "leases are in the server's memory: after its restart they stay taken for ever"
        advice = "start the server with make up, which keeps them in files or in Redis"
        return [*findings, Finding("leases", "problem", seen, advice)]
    return [*findings, Finding("leases", "ok", f"kept by {node}")]


def check_scheduler(api: PrefectApi, moment: datetime) -> Finding:
    """A scheduler that lives has made runs for the future."""
    scheduled = api.scheduled_deployments()
    if not scheduled:
        seen = "no deployment has an active schedule, so whether it works cannot be seen"
        advice = "python -m falaj deploy makes the deployments with their schedules"
        return Finding("scheduler", "warning", seen, advice)
    if run := api.next_scheduled(moment.isoformat()):
        seen = f"next run {run['name']} at {run['expected_start_time'][:19]} UTC"
        return Finding("scheduler", "ok", seen)
    seen = (
        f"no run is scheduled for later than now, although {len(scheduled)} deployments have "
        f"an active schedule ({', '.join(scheduled[:3])})"
    )
    advice = (
        "a new deployment is seen after a minute; if it stays: look for errors in "
        "logs/prefect.log, check the pins above, make down, make up"
    )
    return Finding("scheduler", "problem", seen, advice)


def check_workers(api: PrefectApi, own: Sequence[str]) -> list[Finding]:
    """Each pool has a worker that is online, and hands out runs.

    Args:
        own: pools that have a worker on this machine.
    """
    pools = {pool["name"]: pool for pool in api.pools()}
    findings = [
        Finding(
            "workers",
            "problem",
            f"there is no work pool {name!r}, for which this machine has the hardware",
            "python -m falaj deploy makes it; logs/deploying.log shows why it did not",
        )
        for name in own
        if name not in pools
    ]
    for name, pool in pools.items():
        findings.append(_check_pool(name, pool["is_paused"], _online(api, name), name in own))
    return findings


def _check_pool(name: str, paused: bool, online: Sequence[str], own: bool) -> Finding:
    if not online:
        seen = f"pool {name!r} has no worker online; its runs wait"
        if own:
            return Finding("workers", "problem", seen, f"make status; logs/worker-{name}.log")
        advice = f"nothing, if no run asks for {name!r}: this machine has no such hardware; else "
        return Finding("workers", "warning", seen, f"{advice}start a worker on one that has it")
    if paused:
        seen = f"pool {name!r} is paused and hands out no runs"
        return Finding("workers", "warning", seen, f"prefect work-pool resume {name}, or the UI")
    return Finding("workers", "ok", f"pool {name!r}: {', '.join(online)}")


def check_disk(folder: Path, min_free_bytes: int) -> list[Finding]:
    """Free space and free inodes where the state is."""
    disk = os.statvfs(folder)
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    findings = []
    if free < min_free_bytes:
        seen = f"{free / 1e9:.1f} GB free at {folder}, expected {min_free_bytes / 1e9:.1f} GB"
        advice = "free some space; a full disk stops every run and Prefect's database"
        findings.append(Finding("disk", "problem", seen, advice))
    if disk.f_files and inodes < LEAST_FREE_INODES:  # some file systems count none
        seen = f"{inodes:,} files can still be made at {folder}, expected {LEAST_FREE_INODES:,}"
        advice = "delete small files; without inodes nothing can be written"
        findings.append(Finding("disk", "problem", seen, advice))
    seen = f"{free / 1e9:.1f} GB and {inodes:,} inodes free at {folder}"
    return findings or [Finding("disk", "ok", seen)]


def check_databases(files: Sequence[Path]) -> list[Finding]:
    """SQLite's own check of each database that exists."""
    return [_check_database(file) for file in files if file.exists()]


def _check_database(file: Path) -> Finding:
    if (size := file.stat().st_size) > CHECKED_BYTES:
        seen = f"{file.name}: {size / 1e9:.1f} GB, too large to be read through"
        return Finding("databases", "ok", seen)
    try:
        connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            connection.close()
    except sqlite3.Error as exc:
        if not shows_damage(exc):
            advice = (
                "free some space on its disk, which is full"
                if lack_of_space(file.parent)
                else "correct its owner and mode, or the disk if dmesg shows errors"
            )
            seen = f"{file} cannot be checked now ({exc}); nothing shows that it is damaged"
            advice = f"leave the file as it is; {advice}; make doctor"
            return Finding("databases", "problem", seen, advice)
        answer = str(exc)
    if answer == "ok":
        return Finding("databases", "ok", f"{file.name} is intact, {size / 1e6:.1f} MB")
    advice = (
        f"make down DOWN_ARGS=--now, restore a copy of {file}, or rescue it with "
        "`sqlite3 FILE .recover`; then make up"
    )
    return Finding("databases", "problem", f"{file} is damaged: {answer}", advice)


def check_postgres(url: str, moment: datetime) -> Finding:
    """PostgreSQL answers, and its clock agrees with this machine's."""
    import psycopg

    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            row = connection.execute("SELECT now()").fetchone()
    except psycopg.Error as exc:
        seen = f"PostgreSQL does not answer: {str(exc).splitlines()[0]}"
        return Finding("stores", "problem", seen, "start it, or correct the URL and the network")
    assert row is not None
    gap = abs((row[0] - moment).total_seconds())
    if gap > CLOCK_TOLERANCE_S:
        seen = f"PostgreSQL's clock is {gap:.0f} s away from this machine's"
        return Finding("clock", "problem", seen, "set both by NTP: schedules and leases need it")
    return Finding("stores", "ok", "PostgreSQL answers")


def check_redis(url: str) -> Finding:
    """Redis answers."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            client.ping()
    except redis.RedisError as exc:
        seen = f"Redis does not answer: {exc}"
        return Finding("stores", "problem", seen, "start it, or correct the URL and the network")
    return Finding("stores", "ok", "Redis answers")


def check_writable(folder: Path) -> Finding:
    """Artifacts can be written."""
    probe = folder / f".doctor-{os.getpid()}"
    try:
        make_folder(folder)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as exc:
        seen = f"{folder} cannot be written: {exc.strerror}"
        return Finding("stores", "problem", seen, "correct its owner and mode, or free some space")
    return Finding("stores", "ok", f"{folder} can be written")


def check_clock(state: PlatformState | None, moment: datetime) -> Finding:
    """Nothing was written in the future."""
    written = [state.started, state.written, *(s.since for s in state.services)] if state else []
    latest = max(written, default=moment)
    if latest > moment + timedelta(seconds=CLOCK_TOLERANCE_S):
        back = (latest - moment).total_seconds()
        seen = f"the platform has written at {latest:%F %T} UTC, {back:.0f} s later than now"
        advice = "the clock was set back: set it by NTP, then make down, make up"
        return Finding("clock", "problem", seen, advice)
    if moment < datetime(2025, 1, 1, tzinfo=UTC):
        seen = f"this machine's clock shows {moment:%F}"
        return Finding("clock", "problem", seen, "set the clock by NTP")
    return Finding("clock", "ok", f"{moment:%F %T} UTC")
