"""Commands of registered models: look at versions, answer for a candidate, withdraw one."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any, Literal

from cyclopts import App
from cyclopts.types import PositiveInt

from falaj.context import (
    Approver,
    BreakGlass,
    Comment,
    Context,
    DryRun,
    Here,
    Shown,
    acting,
    recorded_act,
    row,
)
from tasks.contracts.release import PromotionDecision
from tasks.governance.duties import check_approver
from tasks.governance.identity import Subject
from tasks.kernel.errors import ConfigurationError, PromotionRefusedError, RegistryError
from tasks.kernel.settings import Settings
from tasks.kernel.values import checked
from tasks.registry.approval import Answer, known_approval, outcome, read_question
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import (
    CANDIDATE,
    CHAMPION,
    DECISION_TAG,
    TRAINED_BY_TAG,
    RegisteredVersion,
    Registry,
)
from tasks.registry.model_folder import read_evaluation, read_version, sign_version
from tasks.registry.promotion import answer_and_promote, judge_only
from tasks.registry.promotion import withdraw as withdraw_version
from tasks.release.ledger import ReleaseLedger

LONGEST_REASON = 1000
app = App(name="models")


def open_registry(settings: Settings) -> Registry | None:
    """The registry of a state folder; None where nothing was registered there yet."""
    location = RegistryLocation.of(settings)
    file = location.database_path
    return None if file is not None and not file.exists() else Registry(location)


def existing_registry(settings: Settings) -> Registry:
    """The registry of a state folder; asking for a version of one that is not there makes none.

    Raises:
        RegistryError: nothing was registered there yet.
    """
    if (registry := open_registry(settings)) is None:
        raise RegistryError(
            f"nothing is registered in {settings.home}; `falaj run`, in Python run() trains and "
            "promotes one"
        )
    return registry


def version_facts(version: RegisteredVersion, registry: Registry) -> dict[str, Any]:
    """What the registry knows of a version, and how it was judged."""
    report = read_evaluation(version)
    aliases = registry.aliases(version.name).items()
    return {
        "model": version.name,
        "version": version.number,
        "aliases": sorted(alias for alias, number in aliases if number == version.number),
        "created": version.created,
        "metric": report.overall.primary_name if report else None,
        "quality": report.overall.primary if report else None,
        "approval": known_approval(version),
        "withdrawn": registry.why_withdrawn(version),
        "tags": dict(version.tags),
    }


def quality_text(facts: dict[str, Any]) -> str:
    """The primary metric with its interval, as all commands print it."""
    quality = facts["quality"]
    if quality is None:
        return "not judged here"
    return f"{facts['metric']} {quality:.4f}"


def _version_line(facts: dict[str, Any]) -> str:
    state = ", ".join(facts["aliases"])
    remark = facts["withdrawn"] or facts["tags"].get(DECISION_TAG, "")
    created = f"{facts['created']:%F %R}" if facts["created"] else ""
    return (
        f"{facts['model']:<20}{facts['version']:>4}  {state:<20}{created:<18}"
        f"{quality_text(facts):<32}{remark}"
    ).rstrip()


@app.command(name="list")
def list_versions(model: str | None = None, /, *, context: Here) -> Shown:
    """List all registered versions, the newest of each model first.

    Args:
        model: Of this model only.

    Examples:
        falaj models list
        falaj models list --json
    """
    found: list[dict[str, Any]] = []
    if (registry := open_registry(context.settings)) is not None:
        for name in [model] if model else registry.names():
            found += [version_facts(v, registry) for v in reversed(registry.versions(name))]
    none = ["No version is registered; `falaj run` makes the first one."]
    return Shown(found, [_version_line(facts) for facts in found] or none)


def find_version(
    model: str | None, version: int | None, context: Context
) -> tuple[RegisteredVersion, Registry]:
    """The version asked about: by default the champion, or the candidate, of the use case's model.

    Raises:
        RegistryError: there is none.
    """
    from flows.config import read_pipeline_config

    settings = context.settings
    name = model or read_pipeline_config(settings.feature_repo).registry.model_name
    registry = existing_registry(settings)
    if version is not None:
        return registry.version(name, version), registry
    found = registry.pointed_at(name, CHAMPION) or registry.by_alias(name, CANDIDATE)
    if found is None:
        raise RegistryError(
            f"{name} has neither a champion nor a candidate; `falaj models list` shows "
            "what there is"
        )
    return found, registry


@app.command
def show(
    model: str | None = None, version: PositiveInt | None = None, /, *, context: Here
) -> Shown:
    """Show one version: quality, gates' outcome, variants, what it was made from.

    Args:
        model: Registered model (default: the use case's).
        version: Its version (default: the champion, else the candidate).

    Examples:
        falaj models show
        falaj models show flight-delay 3
    """
    found, registry = find_version(model, version, context)
    facts, record = version_facts(found, registry), read_version(found)
    variants = [entry.variant for entry in record.variants.variants] if record.variants else []
    made_of = record.manifest.splits.train if record.manifest else "elsewhere"
    lines = [
        _version_line(facts),
        row("Trained", made_of),
        row("Program", found.ref.program_sha256[:12]),
        row("Snapshot", found.ref.snapshot_sha256[:12]),
        row("Folder", found.folder),
        *(f"{'accepted' if v.accepted else 'dropped':<10}{v.name:<22}{v.reason}" for v in variants),
        *(row("Damaged", damage) for damage in record.damage),
    ]
    return Shown({**facts, "variants": variants, "damage": record.damage}, lines)


@app.command
def sign(
    model: str | None = None, version: PositiveInt | None = None, /, *, context: Here
) -> Shown:
    """Sign a version that has no signature that is trusted, such as one of an earlier release.

    Its files must have the registry's digests. You vouch for them by it; the audit trail says so.

    Args:
        model: Registered model (default: the use case's).
        version: Its version (default: the champion, else the candidate).

    Raises:
        RegistryError: there is none, or a file is missing or was changed.

    Examples:
        falaj models sign flight-delay 3
    """
    acting(context.settings, "approve", None)
    found, _ = find_version(model, version, context)
    sign_version(found)
    return Shown(found.ref, [row("Signed", found)])


@app.command
def approve(
    model: str,
    version: int,
    /,
    *,
    approver: Approver = None,
    comment: Comment = "",
    break_glass: BreakGlass = None,
    dry_run: DryRun = False,
    context: Here,
) -> Shown:
    """Let a candidate that awaits approval become the champion, through all gates.

    The answer replaces an earlier one and counts after the deadline too: it is given on purpose.
    Where people sign in, who trained the version cannot approve it.

    Raises:
        AccessError: who acts may not approve this version.
        ConfigurationError: the approver or the comment cannot be recorded.
        RegistryError: nobody was asked about this version, or it is not there.
        PromotionRefusedError: approved, and a gate is closed by now; the alias was not moved.

    Examples:
        falaj models approve flight-delay 3 --approver Ana --dry-run
        falaj models approve flight-delay 3 --approver Ana --comment "seen the report"
    """
    if dry_run:
        return _judge_question(model, version, context.settings)
    subject = acting(context.settings, "approve", approver, break_glass)
    registered = Registry(RegistryLocation.of(context.settings)).version(model, version)
    check_approver(subject, registered.tags.get(TRAINED_BY_TAG), str(registered))
    return _answer("approve", model, version, subject, comment, context, break_glass)


@app.command
def reject(
    model: str, version: int, /, *, approver: Approver = None, comment: Comment = "", context: Here
) -> Shown:
    """Reject a candidate that awaits approval; it is not asked about again.

    Raises:
        ConfigurationError: the approver or the comment cannot be recorded.
        RegistryError: nobody was asked about this version, or it is not there.

    Examples:
        falaj models reject flight-delay 3 --approver Ana
    """
    subject = acting(context.settings, "approve", approver)
    return _answer("reject", model, version, subject, comment, context)


def _answer(
    decision: Literal["approve", "reject"],
    model: str,
    version: int,
    subject: Subject,
    comment: str,
    context: Context,
    break_glass: str | None = None,
) -> Shown:
    """Record the answer, decide through the gates, and let the run resume that asks."""
    settings, now = context.settings, datetime.now(UTC)
    given = {"decision": decision, "approver": subject.name, "comment": comment, "given": now}
    answer = checked(Answer, given, "the answer", "Nothing was recorded")
    location = RegistryLocation.of(settings)
    named = {"model": model, "version": f"version {version}"}
    with recorded_act(settings, "answer-promotion", subject, decision, **named):
        made = answer_and_promote(model, version, answer, location, settings.store, digest=None)
    lines = _resume_run(model, version, settings, break_glass and (subject.name, break_glass))
    if answer.decision == "approve":
        _check_promoted(made)
    return Shown(made, [row("Model", outcome(made)), *lines])


def _judge_question(model: str, version: int, settings: Settings) -> Shown:
    """What the gates say now of a version that awaits approval."""
    location = RegistryLocation.of(settings)
    registry = Registry(location)
    asked = read_question(registry, registry.version(model, version))
    judged = judge_only(asked, location, settings.store, datetime.now(UTC))
    return Shown(judged, [*gate_lines(judged), "Nothing was changed"])


def gate_lines(decision: PromotionDecision) -> list[str]:
    """Each gate of a decision, open or closed, with its evidence."""
    return [
        f"{gate.name:<22}{'open' if gate.passed else 'CLOSED':<8}{gate.evidence}"
        for gate in decision.gates
    ]


def _check_promoted(decision: PromotionDecision) -> None:
    closed = [f"{gate.name} ({gate.evidence})" for gate in decision.gates if not gate.passed]
    if not decision.promoted:
        raise PromotionRefusedError(
            f"{decision.candidate.name} version {decision.candidate.version} is approved, but gate "
            f"{'; '.join(closed)} is closed by now. The champion stays; train and promote again"
        )


def _resume_run(
    model: str, version: int, settings: Settings, broken: tuple[str, str] | str | None
) -> list[str]:
    """Let the run that asks resume, where a platform runs; the answer is kept either way.

    Args:
        broken: who broke the glass for it, and why; its subscribers are told.
    """
    from infra.platform.files import platform_environment

    found = platform_environment(settings.home)
    if found is None and "PREFECT_API_URL" not in os.environ:
        return []
    os.environ.update(found or {})
    import httpx

    from flows.promotion import announce_broken_glass, settle_waiting_runs

    try:
        if broken:
            announce_broken_glass(model, version, *broken)
        number = settle_waiting_runs(model, version)
    except httpx.HTTPError as exc:
        kept = "the answer is kept, and the run that asks ends by itself at its deadline"
        return [row("Platform", f"could not be notified ({type(exc).__name__}); {kept}")]
    return [row("Platform", "the run that asked resumes")] if number else []


@app.command
def withdraw(
    model: str,
    version: int,
    /,
    *,
    reason: str,
    approver: Approver = None,
    dry_run: DryRun = False,
    context: Here,
) -> Shown:
    """Let a version never serve again, such as one that leaks; the champion before it takes over.

    Args:
        model: Registered model.
        version: Its version.
        reason: Why, for the record.
        approver: Who decides, for the record.

    Raises:
        AccessError: who acts may not.
        ConfigurationError: the reason is none, or a release of the model is open.
        RegistryError: there is no such version.

    Examples:
        falaj models withdraw flight-delay 3 --reason "knows the label" --approver Ana --dry-run
    """
    settings, reason = context.settings, reason.strip()
    if not 0 < len(reason) <= LONGEST_REASON:
        raise ConfigurationError(
            f"--reason has {len(reason)} characters; expected 1 to {LONGEST_REASON}. Nothing was "
            "changed"
        )
    subject = acting(settings, "approve", approver)
    _check_no_release(model, settings)
    if dry_run:
        found, registry = find_version(model, version, context)
        facts = version_facts(found, registry)
        return Shown(facts, [_version_line(facts), "would be withdrawn. Nothing was changed"])
    named = {"model": model, "version": f"version {version}"}
    with recorded_act(settings, "withdraw-version", subject, reason, **named):
        location = RegistryLocation.of(settings)
        record = withdraw_version(model, version, reason, subject.name, location, datetime.now(UTC))
    left = (
        f"version {record.champion.version}"
        if record.champion
        else "none; a server that runs keeps what it has loaded until it is started again. Train "
        "and promote another version"
    )
    withdrawn = f"{record.version.name} version {record.version.version}: {reason}"
    return Shown(record, [row("Withdrawn", withdrawn), row("Champion", left)])


def _check_no_release(model: str, settings: Settings) -> None:
    if settings.database_url is None and not settings.metadata_file.exists():
        return
    release = ReleaseLedger(settings.metadata_url).open_release(model)
    if release is not None:
        raise ConfigurationError(
            f"a release of {model} version {release.candidate} is open; end it first with `falaj "
            f"release rollback {model} --approver NAME`. Nothing was changed"
        )
