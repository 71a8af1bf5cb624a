"""What `doctor` looks at; each check returns findings, and none changes anything."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from infra.orchestration.client import read_password
from infra.platform.api import PrefectApi
from infra.platform.config import Place, PlatformConfig
from infra.platform.state import Endpoint, PlatformState
from tasks.kernel.disk import lack_of_space, shows_damage
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.settings import make_folder

PROJECT = "falaj"
PINNED = ("prefect", "fastapi", "sqlalchemy")
"""Other versions of these stop the server, or its scheduler alone, and hardly say so."""

LEAST_FREE_INODES = 10_000
CLOCK_TOLERANCE_S = 5.0
CHECKED_BYTES = 2_000_000_000
MEMORY_LEASES = "lease_storage.memory"

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        seen: what was found, and where it is wrong, what was expected.
        advice: what to do; empty where all is well.
    """

    name: str
    level: Level
    seen: str
    advice: str = ""


def ok(name: str, seen: str) -> Finding:
    """A finding of something that is well."""
    return Finding(name, "ok", seen)


def check_pins(installed: Mapping[str, str], bounds: Mapping[str, Requirement]) -> list[Finding]:
    """Compare installed versions with those that the project allows."""
    return [
        ok("pins", f"{name} {installed[name]}")
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


def refuse_wrong_pins() -> None:
    """Refuse to start a server that would not schedule.

    Raises:
        ConfigurationError: a version is out of bounds.
    """
    wrong = [finding for finding in check_pins(*installed_pins()) if finding.level != "ok"]
    if wrong:
        raise ConfigurationError(
            f"{'; '.join(finding.seen for finding in wrong)}. Do: {wrong[0].advice}"
        )


def check_secret(place: Place, config: PlatformConfig) -> list[Finding]:
    """The password's file is there, and nobody else can read it."""
    if not config.password:
        seen = "the platform runs without one: every user of this machine can run code through it"
        return [Finding("password", "warning", seen, "make down, make up UP_ARGS=--password")]
    try:
        mode = place.secret.stat().st_mode & 0o777
    except FileNotFoundError:
        seen = f"{place.secret} is missing, so no command reaches the platform"
        return [Finding("password", "problem", seen, "make down, make up, which makes a new one")]
    if mode & 0o077:
        seen = f"{place.secret} has mode {mode:o}, expected 600: others may have read it"
        advice = f"make down, delete {place.secret}, make up, which makes a new one"
        return [Finding("password", "problem", seen, advice)]
    return [ok("password", f"kept in {place.secret}, mode 600")]


def check_private(home: Path) -> list[Finding]:
    """Nobody else can read the data of the state folder."""
    mode = home.stat().st_mode & 0o777
    if mode & 0o077:
        seen = f"{home} has mode {mode:o}, expected 700: others may read data, models, predictions"
        return [
            Finding("state", "warning", seen, f"chmod 700 {home}, if nobody else is to read it")
        ]
    return [ok("state", f"{home} is closed to others, mode 700")]


def check_api(api: PrefectApi) -> list[Finding]:
    """The server answers, knows the password and is of the version installed here."""
    try:
        found = api.version()
        settings = api.settings()
    except ConfigurationError as exc:
        advice = "make down, make up; no other password works meanwhile"
        return [Finding("API", "problem", str(exc), advice)]
    except TransientError as exc:
        advice = "make status; the log is in logs/prefect.log; the supervisor starts it anew"
        return [Finding("API", "problem", str(exc), advice)]
    findings = [_check_version(found), _check_leases(settings)]
    return [ok("API", f"{api.url} answers, with password: {bool(api.password)}"), *findings]


def _check_version(server: str) -> Finding:
    here = version("prefect")
    if server == here:
        return ok("API", f"server and clients are Prefect {here}")
    seen = f"the server is Prefect {server}, installed here is {here}"
    return Finding("API", "problem", seen, "make down, make up: server and clients must be equal")


def _check_leases(settings: Mapping[str, object]) -> Finding:
    node: object = settings
    for name in ("server", "concurrency", "lease_storage"):
        node = node.get(name) if isinstance(node, Mapping) else None
    if MEMORY_LEASES in str(node):
        seen = "leases are in the server's memory: after its restart slots stay taken for ever"
        advice = "start the server with make up, which keeps them in files or in Redis"
        return Finding("leases", "problem", seen, advice)
    return ok("leases", f"kept by {node}")


def check_scheduler(api: PrefectApi, now: datetime) -> list[Finding]:
    """A scheduler that lives has made runs for the future."""
    scheduled = api.scheduled_deployments()
    if not scheduled:
        seen = "no deployment has an active schedule, so whether it works cannot be seen"
        advice = "python -m infra.deploying makes the deployments with their schedules"
        return [Finding("scheduler", "warning", seen, advice)]
    run = api.next_scheduled(now.isoformat())
    if run is None:
        seen = (
            f"no run is scheduled for later than now, although {len(scheduled)} deployments have "
            f"an active schedule ({', '.join(scheduled[:3])})"
        )
        advice = (
            "a new deployment is seen after a minute; if it stays: look for errors in "
            "logs/prefect.log, check the pins above, make down, make up"
        )
        return [Finding("scheduler", "problem", seen, advice)]
    seen = f"next run {run['name']} at {run['expected_start_time'][:19]} UTC"
    return [ok("scheduler", seen)]


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
            "python -m infra.deploying makes it; logs/deploying.log says why it did not",
        )
        for name in own
        if name not in pools
    ]
    for name, pool in pools.items():
        online = [w["name"] for w in api.workers(name) if w["status"] == "ONLINE"]
        findings.append(_check_pool(name, pool["is_paused"], online, name in own))
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
    return ok("workers", f"pool {name!r}: {', '.join(online)}")


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
    return findings or [ok("disk", f"{free / 1e9:.1f} GB and {inodes:,} inodes free at {folder}")]


def check_databases(files: Sequence[Path]) -> list[Finding]:
    """SQLite's own check of each database that exists."""
    return [_check_database(file) for file in files if file.exists()]


def _check_database(file: Path) -> Finding:
    if (size := file.stat().st_size) > CHECKED_BYTES:
        return ok("databases", f"{file.name}: {size / 1e9:.1f} GB, too large to be read through")
    try:
        connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            connection.close()
    except sqlite3.Error as exc:
        if not shows_damage(exc):
            return _unchecked(file, exc)
        answer = str(exc)
    if answer == "ok":
        return ok("databases", f"{file.name} is whole, {size / 1e6:.1f} MB")
    advice = (
        f"make down DOWN_ARGS=--now, put a copy of {file} from before back, or rescue it with "
        "`sqlite3 FILE .recover`; then make up"
    )
    return Finding("databases", "problem", f"{file} is damaged: {answer}", advice)


def _unchecked(file: Path, exc: sqlite3.Error) -> Finding:
    """Why a database could not be looked through, which says nothing about what is in it."""
    advice = (
        "free some space on its disk, which is full"
        if lack_of_space(file.parent)
        else "mend its owner and mode, or the disk if the kernel's log (dmesg) tells of errors"
    )
    seen = f"{file} cannot be checked now ({exc}); nothing says that it is damaged"
    return Finding("databases", "problem", seen, f"leave the file as it is; {advice}; make doctor")


def check_postgres(url: str, now: datetime) -> list[Finding]:
    """PostgreSQL answers, and its clock agrees with this machine's."""
    import psycopg

    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            row = connection.execute("SELECT now()").fetchone()
    except psycopg.Error as exc:
        seen = f"PostgreSQL does not answer: {str(exc).splitlines()[0]}"
        return [Finding("stores", "problem", seen, "start it, or mend the URL and the network")]
    assert row is not None
    gap = abs((row[0] - now).total_seconds())
    if gap > CLOCK_TOLERANCE_S:
        seen = f"PostgreSQL's clock is {gap:.0f} s away from this machine's"
        return [Finding("clock", "problem", seen, "set both by NTP: schedules and leases need it")]
    return [ok("stores", "PostgreSQL answers")]


def check_redis(url: str) -> list[Finding]:
    """Redis answers."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            client.ping()
    except redis.RedisError as exc:
        seen = f"Redis does not answer: {exc}"
        return [Finding("stores", "problem", seen, "start it, or mend the URL and the network")]
    return [ok("stores", "Redis answers")]


def check_writable(folder: Path) -> list[Finding]:
    """Artifacts can be written."""
    probe = folder / f".doctor-{os.getpid()}"
    try:
        make_folder(folder)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as exc:
        seen = f"{folder} cannot be written: {exc.strerror}"
        return [Finding("stores", "problem", seen, "mend its owner and mode, or free some space")]
    return [ok("stores", f"{folder} can be written")]


def check_clock(state: PlatformState | None, now: datetime) -> list[Finding]:
    """Nothing was written in the future."""
    latest = max((moment for moment in _moments(state)), default=now)
    if latest > now + timedelta(seconds=CLOCK_TOLERANCE_S):
        back = (latest - now).total_seconds()
        seen = f"the platform has written at {latest:%F %T} UTC, {back:.0f} s later than now"
        advice = "the clock was set back: set it by NTP, then make down, make up"
        return [Finding("clock", "problem", seen, advice)]
    if now < datetime(2025, 1, 1, tzinfo=UTC):
        seen = f"this machine believes that it is {now:%F}"
        return [Finding("clock", "problem", seen, "set the clock by NTP")]
    return [ok("clock", f"{now:%F %T} UTC")]


def _moments(state: PlatformState | None) -> Iterator[datetime]:
    if state is not None:
        yield from (state.started, state.written)
        yield from (service.since for service in state.services)


def api_of(place: Place, endpoint: Endpoint) -> PrefectApi:
    """The API of the platform that runs."""
    return PrefectApi(endpoint.api_url, read_password(place.folder))
