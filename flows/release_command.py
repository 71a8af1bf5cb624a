"""`python -m flows release`: how a release stands, and what a person wants with it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from tasks.release.records import ByHand, Entry, Release

ACTION = "change-release"
ACTS = {
    "start": "release the champion, also one that was rolled back before",
    "hold": "take no further step until it is resumed; harm still rolls back",
    "resume": "take the hold away",
    "promote": "go to the next step now, or end the release after the last one",
    "rollback": "send all traffic back to the version before, and the alias too",
}
WISHES: dict[str, ByHand] = {
    "hold": "hold",
    "resume": "resume",
    "promote": "promote",
    "rollback": "roll_back",
}
MAX_ENTRIES = 12


def add_release_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    release = commands.add_parser("release", help="how a new version takes over traffic")
    acts = release.add_subparsers(dest="act", required=True, metavar="act")
    status = acts.add_parser("status", help="the newest release, its evidence and its record")
    status.add_argument("--json", action="store_true", help="one JSON object, whole")
    status.add_argument("model", nargs="?", help="registered model (default: the use case's)")
    for name, purpose in ACTS.items():
        act = acts.add_parser(name, help=purpose)
        act.add_argument("model", nargs="?", help="registered model (default: the use case's)")
        act.add_argument("--approver", required=True, metavar="NAME", help="who says so")
        act.add_argument("--comment", default="", help="why")


def change_release(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Show a release, or do what a person wants with it.

    Raises:
        DataContractError: there is nothing to release, none is open, or the name is no name.
        TransientError: server, edge, registry or database did not answer; what was recorded is
            carried out by the next look.
    """
    from flows.config import read_pipeline_config

    config = read_pipeline_config(settings.feature_repo)
    model = options.model or config.registry.model_name
    if options.act == "status":
        return _status(model, settings, as_json=options.json)
    from flows.release_ports import RegistryChampions, release_config, traffic_of
    from tasks.features.access.audit import AuditTrail, process_identity
    from tasks.release.acting import Releasing, act_by_hand, check_name
    from tasks.release.ledger import ReleaseLedger

    check_name(options.approver)
    releasing = Releasing(
        ReleaseLedger(settings.operation_url), traffic_of(settings), RegistryChampions(settings)
    )
    with AuditTrail(settings.home / "audit").recorded(
        ACTION,
        said=options.act,
        subject={"model": model},
        who={**process_identity(), "subject": options.approver},
    ):
        if options.act == "start":
            release = releasing.begin(
                model, release_config(config), options.approver, options.comment
            )
        else:
            release = act_by_hand(
                releasing, model, WISHES[options.act], options.approver, options.comment
            )
    return _lines(release, releasing.ledger.entries(release.release_id))


def _status(model: str, settings: Settings, *, as_json: bool) -> list[str]:
    from tasks.release.ledger import ReleaseLedger

    ledger = ReleaseLedger(settings.operation_url)
    release = ledger.last_release(model)
    if release is None:
        return [f"{model} was never released step by step."]
    entries = ledger.entries(release.release_id)
    if as_json:
        told = {
            "release": release.model_dump(mode="json"),
            "entries": [entry.model_dump(mode="json") for entry in entries],
        }
        return [json.dumps(told)]
    return _lines(release, entries)


def _lines(release: Release, entries: list[Entry]) -> list[str]:
    state = release.state.replace("_", " ")
    held = f", held by {release.held_by}" if release.held_by else ""
    moved = "" if release.is_moved else "; traffic is yet to follow"
    evidence = next((entry.evidence for entry in reversed(entries) if entry.evidence), None)
    step = release.current
    return [
        f"{'Release':<10}{release.model} version {release.candidate} (before: {release.stable}), "
        f"{state}{held}{moved}",
        f"{'Step':<10}{step.name}, {release.step + 1} of {len(release.steps)}, since "
        f"{release.step_since:%F %T}Z: {step.candidate_percent:g} % of the requests, copies of "
        f"{step.mirror_percent:g} %",
        *(
            f"{'Evidence':<10}{f.metric.replace('_', ' ')}{', HARM' if f.is_harm else ''}: "
            f"{f.sentence}"
            for f in (evidence.findings if evidence else ())
        ),
        *(
            f"{entry.at:%F %T}Z  {entry.action.value} ({entry.rule}) by {entry.actor}: "
            f"{entry.reason}"
            for entry in entries[-MAX_ENTRIES:]
        ),
    ]
