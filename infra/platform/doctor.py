"""`doctor`: everything that the platform needs, looked at; each fault with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from infra.orchestration.client import is_running
from infra.platform.checks import (
    Finding,
    api_of,
    check_api,
    check_clock,
    check_databases,
    check_disk,
    check_pins,
    check_postgres,
    check_private,
    check_redis,
    check_scheduler,
    check_secret,
    check_workers,
    check_writable,
    installed_pins,
    ok,
)
from infra.platform.config import COORDINATOR, Place, PlatformConfig, stored_config
from infra.platform.services import database_url, has_prefect_redis, redis_url
from infra.platform.state import read_endpoint, read_state
from infra.platform.status import EXIT_DOWN, EXIT_NOT_RUNNING, EXIT_WELL, read_status
from tasks.control.leases.hardware import hardware_classes
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.settings import Settings

SIGNS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


def examine(place: Place, environment: Mapping[str, str]) -> list[Finding]:
    """All findings, of a platform that runs or of one that does not."""
    config, now = stored_config(place), datetime.now(UTC)
    findings = check_pins(*installed_pins())
    if place.folder.exists():
        findings += check_secret(place, config)
        findings += check_private(place.home)
        findings += check_disk(place.home, config.min_free_bytes)
        findings += check_writable(place.home / "artifacts")
        findings += check_clock(read_state(place), now)
        findings += _stores(place, config, environment, now)
    if is_running(place.home):
        findings += _services(place) + _server(place, now)
    else:
        seen = f"no supervisor lives on {place.home}"
        findings.append(Finding("platform", "problem", seen, "make up"))
    return findings


def _stores(
    place: Place, config: PlatformConfig, environment: Mapping[str, str], now: datetime
) -> list[Finding]:
    settings = Settings(home=place.home, feature_repo=place.home)
    files = [place.prefect / "prefect.db", place.home / "operation" / "operation.db"]
    files += [settings.mlflow_artifacts.parent / "mlflow.db"]
    if config.profile == "embedded":
        return check_databases(files)
    try:
        database, redis = database_url(config, environment), redis_url(config, environment)
    except ConfigurationError as exc:
        advice = "set them in this shell as for make up"
        return [*check_databases(files[1:]), Finding("stores", "warning", str(exc), advice)]
    assert database is not None
    assert redis is not None
    findings = check_postgres(database, now) + check_redis(redis)
    if not has_prefect_redis():
        seen = "prefect-redis is not installed: one server alone may use this database"
        advice = "install it before a second server is started; leases are kept in files until then"
        findings.append(Finding("stores", "warning", seen, advice))
    return [*findings, *check_databases(files[1:])]


def _services(place: Place) -> list[Finding]:
    status = read_status(place)
    if not status.wrong:
        return [ok("services", f"all {len(status.services)} are up")]
    advice = "the supervisor starts again what has ended; its log and theirs say why"
    return [Finding("services", "problem", sentence, advice) for sentence in status.wrong]


def _server(place: Place, now: datetime) -> list[Finding]:
    endpoint = read_endpoint(place)
    if endpoint is None:
        return [Finding("API", "problem", "the server has not answered yet", "wait, make status")]
    api = api_of(place, endpoint)
    findings = check_api(api)
    if findings[0].level != "ok":
        return findings
    try:
        own = (COORDINATOR, *hardware_classes())
        return findings + check_scheduler(api, now) + check_workers(api, own)
    except (TransientError, ConfigurationError) as exc:
        return [*findings, Finding("API", "problem", str(exc), "make status; make logs")]


def report(findings: list[Finding]) -> str:
    """The findings for a person, the faults with what to do."""
    lines = []
    for finding in findings:
        lines.append(f"{SIGNS[finding.level]}  {finding.name:<11}{finding.seen}")
        if finding.advice:
            lines.append(f"{'':<9}{'':<11}-> {finding.advice}")
    wrong = sum(finding.level == "problem" for finding in findings)
    warned = sum(finding.level == "warning" for finding in findings)
    counted = f"{_count(wrong, 'problem')}, {_count(warned, 'warning')}"
    lines += ["", f"{counted}, {len(findings)} things looked at"]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def exit_code(findings: list[Finding]) -> int:
    """0 no problem, 1 at least one, 3 the only one is that no platform runs."""
    problems = [finding.name for finding in findings if finding.level == "problem"]
    if problems == ["platform"]:
        return EXIT_NOT_RUNNING
    return EXIT_DOWN if problems else EXIT_WELL
