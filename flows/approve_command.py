"""`python -m flows approve` and `reject`: answer for a candidate that waits for a person."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from flows.config import faults
from infra.orchestration.client import platform_environment
from tasks.contracts.release import PromotionDecision
from tasks.features.access.audit import AuditTrail, process_identity
from tasks.kernel.errors import ConfigurationError, PromotionRefusedError
from tasks.kernel.settings import Settings

COMMANDS = {
    "approve": "let a candidate that waits become the champion, through all gates",
    "reject": "turn a candidate that waits down; it is not asked about again",
}


def add_approve_commands(commands: Any) -> None:
    """Declare the commands and their arguments."""
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        command.add_argument("model", help="registered model")
        command.add_argument("version", type=int, help="its version")
        command.add_argument("--approver", required=True, metavar="NAME", help="who says so")
        command.add_argument("--comment", default="", help="why")


def answer_candidate(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Record the answer, decide through the gates, and let the run go on that asks.

    The answer replaces an earlier one and counts after the deadline too: it is given on purpose.

    Raises:
        ConfigurationError: the approver or the comment cannot be recorded.
        RegistryError: nobody was asked about this version, or it is not there.
        PromotionRefusedError: approved, and a gate is closed by now; the alias was not moved.
    """
    from tasks.registry.approval import Answer
    from tasks.registry.connection import RegistryLocation
    from tasks.registry.promotion import answer_and_promote
    from tasks.registry.question import outcome

    try:
        answer = Answer(
            decision=options.command,
            approver=options.approver,
            comment=options.comment,
            given=datetime.now(UTC),
        )
    except ValidationError as exc:
        raise ConfigurationError(f"{faults(exc)}. Nothing was recorded") from exc
    location = RegistryLocation.of(settings)
    with AuditTrail(settings.home / "audit").recorded(
        "answer-promotion",
        said=answer.decision,
        subject={"model": options.model, "version": f"version {options.version}"},
        who={**process_identity(), "subject": answer.approver},
    ):
        decision = answer_and_promote(
            options.model, options.version, answer, location, settings.store, overrule=True
        )
    lines = _tell_the_platform(options.model, options.version, settings)
    _check_it_had_effect(decision, answer)
    return [f"{'Model':<10}{outcome(decision)}", *lines]


def _check_it_had_effect(decision: PromotionDecision, answer: Any) -> None:
    closed = [f"{gate.name} ({gate.evidence})" for gate in decision.gates if not gate.passed]
    if answer.decision == "approve" and not decision.promoted:
        raise PromotionRefusedError(
            f"{decision.candidate.name} version {decision.candidate.version} is approved, but gate "
            f"{'; '.join(closed)} is closed by now. The champion stays; train and promote anew"
        )


def _tell_the_platform(model: str, version: int, settings: Settings) -> list[str]:
    """Let the run that asks go on, where a platform runs; the answer stands either way."""
    found = platform_environment(settings.home)
    if found is None and "PREFECT_API_URL" not in os.environ:
        return []
    os.environ.update(found or {})
    import httpx

    from flows.approval import settle_waiting_runs

    try:
        number = settle_waiting_runs(model, version)
    except httpx.HTTPError as exc:
        return [
            f"{'Platform':<10}could not be told ({type(exc).__name__}); the answer stands, and the "
            "run that asks ends by itself when its time is over"
        ]
    return [f"{'Platform':<10}the run that asked goes on"] if number else []
