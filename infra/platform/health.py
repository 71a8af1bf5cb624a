"""`status`: what runs. `doctor`: everything the platform needs is checked; each fault with advice.

Nothing here changes anything.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from pydantic import Field

from infra.orchestration.client import is_running, read_password
from infra.platform.api import PROBE_TIMEOUT_S, Json, PrefectApi, answers
from infra.platform.config import SERVING, PlatformConfig, kept_options, stored_config
from infra.platform.files import (
    Endpoint,
    GroupState,
    PlatformFiles,
    ServiceState,
    now,
    other_code,
    paused_pools,
    read_endpoint,
    read_state,
)
from infra.platform.services import MLFLOW, SERVER, STORES, has_prefect_redis, store_url
from tasks.contracts.hardware import read_classes
from tasks.control.config import RecoveryConfig
from tasks.control.leases.devices import Host
from tasks.control.leases.placement import Claim
from tasks.control.leases.repository import LeaseRepository
from tasks.control.recovery.judge import SWEPT
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.files import lack_of_space, shows_damage
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.kernel.tenants import tenant_of
from tasks.kernel.values import Contract
from tasks.metadata.identity import copied_from

EXIT_WELL, EXIT_DOWN, EXIT_NOT_RUNNING = 0, 1, 3

PINNED = ("prefect", "fastapi", "sqlalchemy")
"""Other versions of these stop the server, or its scheduler alone, with hardly a message."""

LEAST_FREE_BYTES = 2_000_000_000
LEAST_FREE_INODES = 10_000
CLOCK_TOLERANCE_S = 5.0
CHECKED_BYTES = 2_000_000_000

Level = Literal["ok", "warning", "problem"]
SIGNS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


class PoolStatus(Contract):
    """A work pool, and how many of its workers are online, on any machine."""

    name: str
    type: str
    paused: bool
    online: int


class Status(Contract):
    """The platform as it is now.

    Attributes:
        running: a supervisor lives.
        phase: what it is doing; `dead` where one was killed.
        leases: who holds devices and who waits for them.
        options: with which it runs, or ran last; later starts have them too.
        wrong: one sentence for each thing that is not well.
    """

    running: bool
    phase: str
    home: Path
    options: dict[str, str] = Field(default={})
    endpoint: Endpoint | None = None
    services: tuple[ServiceState, ...] = ()
    groups: tuple[GroupState, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    leases: tuple[Claim, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all well, 1 something is down, 3 not running."""
        if not self.running:
            return EXIT_NOT_RUNNING
        return EXIT_DOWN if self.wrong else EXIT_WELL


def read_status(files: PlatformFiles) -> Status:
    """Read the supervisor's files, and query the servers themselves."""
    state, running = read_state(files), is_running(files.home)
    settings = replace(Settings.from_environment(), home=files.home)
    own = tenant_of(files.home)
    status = Status(
        running=running,
        phase=state.phase if state else "starting",
        home=files.home,
        options={name: str(value) for name, value in kept_options(files).items()},
        leases=tuple(c.seen_by(own) for c in LeaseRepository(settings.leases_path).claims()),
    )
    if not running:
        phase = "dead" if state is not None and state.phase != "stopped" else "down"
        return status.model_copy(update={"phase": phase})
    wrong = [f"the platform is {status.phase}"] if status.phase != "up" else []
    services = state.services if state else ()
    wrong += [
        f"{service.name} is {service.condition}"
        f"{': ' * bool(service.detail)}{service.detail}; its log is {files.log(service.name)}"
        for service in services
        if service.condition not in ("up", "done")
    ]
    if paused := paused_pools(files):
        wrong.append(
            f"going down has paused the pools {', '.join(paused)}, and their runs wait; make up "
            "resumes them"
        )
    endpoint = read_endpoint(files)
    groups = state.groups if state else ()
    pools = _pools(endpoint, files, [g.name for g in groups if g.name != SERVING], wrong)
    found = {"endpoint": endpoint, "services": services, "groups": groups, "pools": pools}
    return status.model_copy(update={**found, "wrong": tuple(wrong)})


def _pools(
    endpoint: Endpoint | None, files: PlatformFiles, own: Sequence[str], wrong: list[str]
) -> tuple[PoolStatus, ...]:
    """The pools as the server sees them, and what is wrong with them and with the servers.

    Args:
        own: pools that have a worker on this machine.
    """
    if endpoint is None:
        wrong.append(f"{SERVER} has not answered yet")
        return ()
    if not answers(f"{endpoint.local_mlflow_url}/health"):
        wrong.append(f"{MLFLOW} does not answer at {endpoint.local_mlflow_url}")
    api = PrefectApi(endpoint.api_url, read_password(files.folder), PROBE_TIMEOUT_S)
    try:
        pools = tuple(
            PoolStatus(
                name=pool["name"],
                type=pool["type"],
                paused=pool["is_paused"],
                online=sum(worker["status"] == "ONLINE" for worker in api.workers(pool["name"])),
            )
            for pool in api.pools()
        )
        wrong += pool_faults(pools, own, paused_pools(files))
        wrong += waiting_for_workers(api, [pool.name for pool in pools if not pool.online])
        wrong += given_up(api)
    except (TransientError, ConfigurationError) as exc:
        wrong.append(str(exc))
        return ()
    return pools


def pool_faults(
    pools: Sequence[PoolStatus], own: Sequence[str], paused_by_down: Sequence[str]
) -> list[str]:
    """Own pools that are not there, and pools that a person has paused."""
    absent = set(own) - {pool.name for pool in pools}
    faults = [
        f"there is no work pool {name!r}, for which this machine runs a worker; "
        "logs/deploying.log shows why; falaj deploy makes it"
        for name in sorted(absent)
    ]
    return faults + [
        f"work pool {pool.name!r} is paused and hands out no runs; prefect work-pool resume "
        f"{pool.name}"
        for pool in pools
        if pool.paused and pool.name not in paused_by_down
    ]


def waiting_for_workers(api: PrefectApi, pools: Sequence[str]) -> list[str]:
    """Runs that are late because their pool has no worker; one sentence for each pool."""
    due_before = (now() - timedelta(seconds=60)).isoformat()
    waiting: dict[str, list[Json]] = {}
    due = api.runs(["SCHEDULED"], pools, expected_start_time={"before_": due_before})
    for run in due if pools else ():
        waiting.setdefault(str(run["work_pool_name"]), []).append(run)
    return [
        f"no worker of work pool {pool!r} is online, and runs wait: {len(runs)}, of which "
        f"{first['name']} was due {age(datetime.fromisoformat(first['expected_start_time']))} "
        f"ago. Start one on a machine with the hardware: falaj worker {pool}"
        for pool, runs in sorted(waiting.items())
        for first in [min(runs, key=lambda run: str(run["expected_start_time"]))]
    ]


def given_up(api: PrefectApi) -> list[str]:
    """Deployed runs, called by no other, cut off so often that nobody starts them again."""
    most = RecoveryConfig().max_retries + 1
    crashed = api.runs(
        ["CRASHED"],
        end_time={"after_": (now() - timedelta(days=1)).isoformat()},
        deployment_id={"is_null_": False},
        parent_task_run_id={"is_null_": True},
    )
    tries = [run["run_count"] or 1 + _num_restarts(api, run["id"]) for run in crashed]
    return [
        f"run {run['name']} was cut off {number} times, last "
        f"{age(datetime.fromisoformat(run['end_time']))} ago, and is not started again. Its log "
        f"shows what it was doing; to resume: falaj --on-platform retry {run['name']}"
        for run, number in zip(crashed, tries, strict=True)
        if number >= most
    ]


def _num_restarts(api: PrefectApi, run_id: str) -> int:
    """How often a sweep has started a run again that never began: the server counts none."""
    return sum(
        state["name"] == "AwaitingRetry" and str(state["message"]).startswith(SWEPT)
        for state in api.states(run_id)
    )


def table(status: Status) -> str:
    """The status for a person."""
    named = ", ".join(f"{name}={value}" for name, value in status.options.items())
    kept = f"{'Options':<12}{named}; kept for each start, dropped by make up UP_ARGS=--reset"
    lines = [f"{'State':<12}{status.phase}, on {status.home}"]
    if not status.running:
        remark = " It was killed; make up starts it again." if status.phase == "dead" else ""
        lines = [f"No platform runs on {status.home}.{remark}"]
    lines += [kept] if named else []
    if at := status.endpoint:
        urls = {"Prefect": at.ui_url, "MLflow": at.mlflow_url, "Serving": at.serving_url}
        lines += [f"{name:<12}{url}" for name, url in urls.items() if url]
    services = [(s.name, s.condition, age(s.since), s.restarts, s.detail) for s in status.services]
    lines += _columns("Service Condition Since Restarts Detail", services)
    groups = [(g.name, g.count, g.wanted, g.reason) for g in status.groups if not g.is_usual]
    lines += _columns("Group Running Wanted Reason", groups)
    pools = [(p.name, p.online, "paused" if p.paused else "hands out runs") for p in status.pools]
    lines += _columns("Pool Workers State", pools)
    leases = [
        ("held" if a.grant else "waiting", age(a.since), a.priority, a) for a in status.leases
    ]
    lines += _columns("Lease Since Priority Holder", leases)
    if status.running:
        lines += ["", *([] if status.wrong else ["All is well."])]
    return "\n".join([*lines, *status.wrong])


def _columns(headings: str, rows: Sequence[Sequence[object]]) -> list[str]:
    """A table, an empty line before it; nothing where there is no row."""
    if not rows:
        return []
    texts = [headings.split(), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*texts, strict=True)]
    lines = [[f"{c:<{w}}" for c, w in zip(row, widths, strict=True)] for row in texts]
    return ["", *("".join(line).rstrip() for line in lines)]


def age(since: datetime) -> str:
    """How long ago a moment was, for people."""
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
    config = stored_config(files)
    findings = [*check_pins(), check_hardware(files.home)]
    if files.folder.exists():
        findings += [check_secret(files, config), check_private(files.home)]
        findings += [*check_copy(files.home), *check_disk(files.home)]
        findings += _check_stores(files, config, environment)
    if not is_running(files.home):
        seen = f"no supervisor lives on {files.home}"
        return [*findings, Finding("platform", "problem", seen, "make up")]
    if running := other_code(files):
        seen = f"the platform runs {running}, and this is {code_commit()}"
        findings.append(Finding("code", "warning", seen, "falaj up starts it again with this code"))
    status = read_status(files)
    advice = "the supervisor restarts what has ended; its log and theirs show why"
    findings += [Finding("services", "problem", wrong, advice) for wrong in status.wrong]
    if not status.wrong:
        findings.append(Finding("services", "ok", f"all {len(status.services)} are up"))
    if status.endpoint is not None:
        findings += check_api(PrefectApi(status.endpoint.api_url, read_password(files.folder)))
    return findings


def report(findings: list[Finding]) -> str:
    """The findings for a person, the faults with what to do."""
    lines = []
    for finding in findings:
        lines.append(f"{SIGNS[finding.level]}  {finding.name:<11}{finding.seen}")
        if finding.advice:
            lines.append(f"{'':<20}-> {finding.advice}")
    levels = [finding.level for finding in findings]
    counts = f"{levels.count('problem')} problems, {levels.count('warning')} warnings"
    return "\n".join([*lines, "", f"{counts}, {len(findings)} checks"])


def exit_code(findings: list[Finding]) -> int:
    """0 no problem, 1 at least one, 3 the only one is that no platform runs."""
    problems = [finding.name for finding in findings if finding.level == "problem"]
    if problems == ["platform"]:
        return EXIT_NOT_RUNNING
    return EXIT_DOWN if problems else EXIT_WELL


def check_pins(installed: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Compare versions, by default those installed, with those that the project allows."""
    for bound in map(Requirement, requires("falaj") or ()):
        if bound.name not in (installed or PINNED):
            continue
        found = installed[bound.name] if installed else version(bound.name)
        if bound.specifier.contains(found, prereleases=True):
            yield Finding("pins", "ok", f"{bound.name} {found}")
            continue
        yield Finding(
            "pins",
            "problem",
            f"{bound.name} {found} is installed, expected {bound.specifier}; with other versions "
            "Prefect's server does not start, or never makes a scheduled run",
            "make setup, which installs the locked versions; then make down, make up",
        )


def check_hardware(home: Path) -> Finding:
    """Of which hardware classes this host is, and what it lacks of the others."""
    try:
        host, classes = Host.this(), read_classes(home)
    except ConfigurationError as exc:
        return Finding("hardware", "problem", str(exc), "correct it: no worker starts before that")
    lacks = {name: host.lacks(described.requires) for name, described in classes.items()}
    is_of = ", ".join(name for name, lacking in lacks.items() if not lacking) or "none"
    others = [f"not of {name}: {', '.join(lacking)}" for name, lacking in lacks.items() if lacking]
    return Finding("hardware", "ok", "; ".join([f"this host is of the classes {is_of}", *others]))


def check_secret(files: PlatformFiles, config: PlatformConfig) -> Finding:
    """The password's file is there, and nobody else can read it."""
    if not config.password:
        seen = "the platform runs without one: every user of this machine can run code through it"
        return Finding("password", "warning", seen, "make down, make up UP_ARGS=--password")
    advice = f"make down, delete {files.secret}, make up, which makes a new one"
    if not files.secret.exists():
        seen = f"{files.secret} is missing, so no command reaches the platform"
        return Finding("password", "problem", seen, advice)
    return _check_closed("password", files.secret, 0o600, "problem", advice)


def check_private(home: Path) -> Finding:
    """Nobody else can read the data of the state folder."""
    advice = f"chmod 700 {home}, if nobody else is to read it"
    return _check_closed("state", home, 0o700, "warning", advice)


def _check_closed(name: str, path: Path, wanted: int, level: Level, advice: str) -> Finding:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        seen = f"{path} has mode {mode:o}, expected {wanted:o}: others may read it"
        return Finding(name, level, seen, advice)
    return Finding(name, "ok", f"{path} is closed to others, mode {mode:o}")


def check_copy(home: Path) -> Iterator[Finding]:
    """Whether the state folder was copied or moved since a platform last came up on it."""
    if (found := copied_from(home)) is None:
        return
    seen = f"{home} was copied or moved from {found[0]}"
    if not found[1]:
        yield Finding("state", "ok", seen)
        return
    seen += ", which is there still and has the same identity"
    advice = "falaj up gives the copy one of its own, and each of the two trains and releases then"
    yield Finding("state", "warning", seen, f"{advice}; where that is not meant, remove one")


def check_disk(folder: Path) -> Iterator[Finding]:
    """Where the state is, files can be made, and there is space for them."""
    disk = os.statvfs(folder)
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    seen = f"{free / 1e9:.1f} GB free at {folder}, {inodes:,} files can still be made"
    few_inodes = disk.f_files and inodes < LEAST_FREE_INODES  # some file systems count none
    if free < LEAST_FREE_BYTES or few_inodes:
        seen += f"; expected {LEAST_FREE_BYTES / 1e9:.0f} GB and {LEAST_FREE_INODES:,}"
        advice = "free some space; a full disk stops every run and Prefect's database"
        yield Finding("disk", "problem", seen, advice)
    elif not os.access(folder, os.W_OK):
        advice = "correct the folder's owner and mode, or mount its disk for writing"
        yield Finding("disk", "problem", f"{folder} cannot be written", advice)
    else:
        yield Finding("disk", "ok", seen)


def _check_stores(
    files: PlatformFiles, config: PlatformConfig, environment: Mapping[str, str]
) -> Iterator[Finding]:
    settings = Settings(home=files.home, feature_repo=files.home)
    databases = [files.home / "operation" / "operation.db"]
    databases += [settings.mlflow_artifacts.parent / "mlflow.db"]
    databases += [files.prefect / "prefect.db"] if config.profile == "embedded" else []
    yield from (check_database(file) for file in databases if file.exists())
    try:
        database, redis = (store_url(name, config, environment) for name in STORES)
    except ConfigurationError as exc:
        yield Finding("stores", "warning", str(exc), "set them in this shell as for make up")
        return
    if database is not None and redis is not None:
        yield check_postgres(database)
        yield check_redis(redis)


def check_database(file: Path) -> Finding:
    """SQLite's own check of a database."""
    size = file.stat().st_size
    if size > CHECKED_BYTES:
        seen = f"{file.name}: {size / 1e9:.1f} GB, too large to be read through"
        return Finding("databases", "ok", seen)
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)) as database:
            answer = database.execute("PRAGMA quick_check(1)").fetchone()[0]
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
        "make down DOWN_ARGS=--now, bring a backup with falaj restore, or rescue it with "
        "`sqlite3 FILE .recover`; then make up"
    )
    return Finding("databases", "problem", f"{file} is damaged: {answer}", advice)


def check_postgres(url: str) -> Finding:
    """PostgreSQL answers, and its clock agrees with this machine's."""
    import psycopg

    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            row = connection.execute("SELECT now()").fetchone()
    except psycopg.Error as exc:
        seen = f"PostgreSQL does not answer: {str(exc).splitlines()[0]}"
        return Finding("stores", "problem", seen, "start it, or correct the URL and the network")
    assert row is not None
    gap = abs((row[0] - datetime.now(UTC)).total_seconds())
    if gap > CLOCK_TOLERANCE_S:
        seen = f"PostgreSQL's clock is {gap:.0f} s away from this machine's"
        return Finding("clock", "problem", seen, "set both by NTP: schedules and leases need it")
    return Finding("stores", "ok", "PostgreSQL answers")


def check_redis(url: str) -> Finding:
    """Redis answers, and is used for all that several servers share."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            client.ping()
    except redis.RedisError as exc:
        seen = f"Redis does not answer: {exc}"
        return Finding("stores", "problem", seen, "start it, or correct the URL and the network")
    if has_prefect_redis():
        return Finding("stores", "ok", "Redis answers")
    seen = "Redis answers; without prefect-redis one server alone may use this database"
    return Finding("stores", "warning", seen, "install it before a second server is started")


def check_api(api: PrefectApi) -> Iterator[Finding]:
    """The server answers, is of the version installed here, and plans runs."""
    try:
        server, here = api.version(), version("prefect")
        if server == here:
            yield Finding("API", "ok", f"{api.url} answers, Prefect {server}")
        else:
            seen = f"the server is Prefect {server}, installed here is {here}"
            yield Finding("API", "problem", seen, "make down, make up: both must be equal")
        yield check_scheduler(api)
    except (ConfigurationError, TransientError) as exc:
        advice = "make status; its log is logs/prefect.log; for another password make down, make up"
        yield Finding("API", "problem", str(exc), advice)


def check_scheduler(api: PrefectApi) -> Finding:
    """A scheduler that lives has made runs for the future."""
    scheduled = api.scheduled_deployments()
    if not scheduled:
        seen = "no deployment has an active schedule, so whether it works cannot be seen"
        advice = "falaj deploy makes the deployments with their schedules"
        return Finding("scheduler", "warning", seen, advice)
    if planned := api.planned_runs(now().isoformat()):
        seen = f"next run {planned[0]['name']} at {planned[0]['expected_start_time'][:19]} UTC"
        return Finding("scheduler", "ok", seen)
    seen = f"no run is planned, although {len(scheduled)} deployments have an active schedule"
    advice = (
        "a new deployment is seen after a minute; if it stays: look for errors in "
        "logs/prefect.log, check the pins above, make down, make up"
    )
    return Finding("scheduler", "problem", seen, advice)
