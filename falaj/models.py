"""Commands of registered models: answer for a candidate, withdraw a version."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from cyclopts import App

from falaj.context import Approver, Comment, Context, Here, recorded_act
from falaj.loop import row
from tasks.kernel.errors import ConfigurationError, PromotionRefusedError
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from tasks.contracts.release import PromotionDecision

LONGEST_REASON = 1000
app = App(name="models")


@app.command
def approve(
    model: str, version: int, /, *, approver: Approver, comment: Comment = "", context: Here
) -> list[str]:
    """Let a candidate that awaits approval become the champion, through all gates.

    The answer replaces an earlier one and counts after the deadline too: it is given on purpose.

    Raises:
        ConfigurationError: the approver or the comment cannot be recorded.
        RegistryError: nobody was asked about this version, or it is not there.
        PromotionRefusedError: approved, and a gate is closed by now; the alias was not moved.
    """
    return _answer("approve", model, version, approver, comment, context)


@app.command
def reject(
    model: str, version: int, /, *, approver: Approver, comment: Comment = "", context: Here
) -> list[str]:
    """Reject a candidate that awaits approval; it is not asked about again.

    Raises:
        ConfigurationError: the approver or the comment cannot be recorded.
        RegistryError: nobody was asked about this version, or it is not there.
    """
    return _answer("reject", model, version, approver, comment, context)


def _answer(
    decision: Literal["approve", "reject"],
    model: str,
    version: int,
    approver: str,
    comment: str,
    context: Context,
) -> list[str]:
    """Record the answer, decide through the gates, and let the run resume that asks."""
    from pydantic import ValidationError

    from flows.config import faults
    from tasks.registry.approval import Answer, outcome
    from tasks.registry.connection import RegistryLocation
    from tasks.registry.promotion import answer_and_promote

    settings, now = context.settings, datetime.now(UTC)
    try:
        answer = Answer(decision=decision, approver=approver, comment=comment, given=now)
    except ValidationError as exc:
        raise ConfigurationError(f"{faults(exc)}. Nothing was recorded") from exc
    location = RegistryLocation.of(settings)
    named = {"model": model, "version": f"version {version}"}
    with recorded_act(settings, "answer-promotion", answer.approver, decision, **named):
        made = answer_and_promote(model, version, answer, location, settings.store, digest=None)
    lines = _resume_run(model, version, settings)
    if answer.decision == "approve":
        _check_promoted(made)
    return [row("Model", outcome(made)), *lines]


def _check_promoted(decision: PromotionDecision) -> None:
    closed = [f"{gate.name} ({gate.evidence})" for gate in decision.gates if not gate.passed]
    if not decision.promoted:
        raise PromotionRefusedError(
            f"{decision.candidate.name} version {decision.candidate.version} is approved, but gate "
            f"{'; '.join(closed)} is closed by now. The champion stays; train and promote again"
        )


def _resume_run(model: str, version: int, settings: Settings) -> list[str]:
    """Let the run that asks resume, where a platform runs; the answer is kept either way."""
    from infra.orchestration.client import platform_environment

    found = platform_environment(settings.home)
    if found is None and "PREFECT_API_URL" not in os.environ:
        return []
    os.environ.update(found or {})
    import httpx

    from flows.promotion import settle_waiting_runs

    try:
        number = settle_waiting_runs(model, version)
    except httpx.HTTPError as exc:
        return [
            row(
                "Platform",
                f"could not be notified ({type(exc).__name__}); the answer is kept, and the run "
                "that asks ends by itself at its deadline",
            )
        ]
    return [row("Platform", "the run that asked resumes")] if number else []


@app.command
def withdraw(
    model: str, version: int, /, *, reason: str, approver: Approver, context: Here
) -> list[str]:
    """Let a version never serve again, such as one that leaks; the champion before it takes over.

    Args:
        model: Registered model.
        version: Its version.
        reason: Why, for the record.
        approver: Who decides, for the record.

    Raises:
        ConfigurationError: the reason or the name is none, or a release of the model is open.
        RegistryError: there is no such version.
    """
    from tasks.registry.connection import RegistryLocation
    from tasks.registry.promotion import withdraw as withdraw_version

    settings, reason, approver = context.settings, reason.strip(), approver.strip()
    if not reason or not approver or len(reason) > LONGEST_REASON:
        raise ConfigurationError(
            f"--reason has {len(reason)} characters and --approver {len(approver)}; expected a "
            f"reason of 1 to {LONGEST_REASON} and a name. Nothing was changed"
        )
    _check_no_release(model, settings)
    named = {"model": model, "version": f"version {version}"}
    with recorded_act(settings, "withdraw-version", approver, reason, **named):
        location = RegistryLocation.of(settings)
        record = withdraw_version(model, version, reason, approver, location, datetime.now(UTC))
    left = (
        f"version {record.champion.version}"
        if record.champion
        else "none; a server that runs keeps what it has loaded until it is started again. Train "
        "and promote another version"
    )
    withdrawn = f"{record.version.name} version {record.version.version}: {reason}"
    return [row("Withdrawn", withdrawn), row("Champion", left)]


def _check_no_release(model: str, settings: Settings) -> None:
    from tasks.release.ledger import ReleaseLedger

    if settings.database_url is None and not settings.metadata_file.exists():
        return
    release = ReleaseLedger(settings.metadata_url).open_release(model)
    if release is not None:
        raise ConfigurationError(
            f"a release of {model} version {release.candidate} is open; end it first with `python "
            f"-m falaj release rollback {model} --approver NAME`. Nothing was changed"
        )
