"""Commands that need no Prefect: servers and repair of the feature store, and the audit trail."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from flows.feature_servers import PORTS, feature_servers, wait_for_any
from infra.orchestration.embedded import only_run
from tasks.features.access.audit import AuditLine, AuditTrail
from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tasks.kernel.settings import Settings

SHOWN_LINES = 20


def add_feature_commands(commands: Any) -> None:
    """Declare the commands and their arguments."""
    serve = commands.add_parser("serve-features", help="serve features to callers with OIDC tokens")
    serve.add_argument("--only", choices=PORTS, help="start this server alone")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (loopback)")
    for kind, port in PORTS.items():
        serve.add_argument(f"--{kind}-port", type=int, default=port, metavar="PORT")
    serve.add_argument("--tls-cert", type=Path, help="certificate, needed outside of loopback")
    serve.add_argument("--tls-key", type=Path)
    rebuild = commands.add_parser(
        "rebuild-features", help="write feature views online again from the published tables"
    )
    rebuild.add_argument("view", nargs="*", help="feature views (default: all that are online)")
    rebuild.add_argument("--pushed", action="store_true", help="also remove what was pushed")
    forget = commands.add_parser(
        "forget-features", help="remove values online: of a view, an entity, a feature"
    )
    forget.add_argument("view", nargs="*", help="feature views (default: all of the entity's kind)")
    forget.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one entity, by its join key; several for a key of several parts",
    )
    forget.add_argument("--feature", action="append", default=[], help="this feature alone")
    audit = commands.add_parser("audit", help="show who did what with features and models")
    audit.add_argument("--verify", action="store_true", help="follow the chain of lines, only")
    audit.add_argument("--json", action="store_true", help="whole lines, as they are stored")
    audit.add_argument(
        "--last",
        type=_at_least_one,
        default=SHOWN_LINES,
        metavar="N",
        help=f"lines shown ({SHOWN_LINES})",
    )


def serve_features(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Serve until interrupted.

    Raises:
        ConfigurationError: a server refused to start: no issuer, no permissions, no encryption.
        TransientError: a server ended.
    """
    kinds = [options.only] if options.only else list(PORTS)
    ports = {kind: getattr(options, f"{kind}_port") for kind in PORTS}
    with feature_servers(
        settings, kinds, options.host, ports, options.tls_cert, options.tls_key
    ) as servers:
        for kind in kinds:
            sys.stdout.write(f"{kind:<10}{options.host}:{ports[kind]}\n")
        sys.stdout.write("Ctrl-C ends them\n")
        sys.stdout.flush()
        ended = wait_for_any(servers)
    raise TransientError(
        f"the {ended} feature server ended; its log is under {settings.home / 'feast' / 'servers'}"
    )


def rebuild_features(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Write views online again, from the published tables up to what is online.

    Raises:
        ConfigurationError: there is no such view, or a run is under way.
        FeatureStoreError: nothing is online yet.
    """
    from tasks.features.online.repair import rebuild_views
    from tasks.features.tables.build import current_tables

    home = settings.features_home
    with only_run(settings.home):
        written = rebuild_views(
            current_tables(home),
            options.view,
            home,
            settings.feature_repo,
            settings.store,
            pushed=options.pushed,
        )
    return [
        f"{view:<20}{number:>8,} entities written from its table"
        for view, number in written.items()
    ]


def forget_features(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Remove values online; what the tables hold of them comes back with `rebuild-features`.

    Raises:
        ConfigurationError: a view, key or feature is not there, or a run is under way.
    """
    from tasks.features.online.repair import forget_values

    if unclear := [text for text in options.key if "=" not in text]:
        raise ConfigurationError(
            f"--key {unclear[0]} names no value; write it as NAME=VALUE. Nothing was changed"
        )
    key = dict(text.split("=", 1) for text in options.key)
    with only_run(settings.home):
        found = forget_values(
            options.view, key, options.feature, settings.features_home, settings.feature_repo
        )
    lines = [f"{view:<20}{number:>8,} entities forgotten" for view, number in found.items()]
    return [*lines, "what the tables hold of them comes back with rebuild-features"]


def show_audit(options: argparse.Namespace, settings: Settings) -> list[str]:
    """The newest lines of the audit trail, and whether its chain is whole.

    The lines of a broken chain are shown too, before it is refused.

    Raises:
        ConfigurationError: there is no state folder.
        DataContractError: a line was changed, removed or put in between, or all of them are gone.
    """
    trail = AuditTrail(settings.features_home / "audit")
    verdict = trail.verify()
    if not verdict.num_lines:
        _check_never_used(trail, settings.features_home)
    lines = [] if options.verify else list(trail.lines())[-options.last :]
    shown = [_as_stored(line) if options.json else _told(line) for line in lines]
    if verdict.faults:
        sys.stdout.writelines(f"{line}\n" for line in shown)
        sys.stdout.flush()
        raise DataContractError(
            f"the audit trail in {trail.folder} is not whole: {'; '.join(verdict.faults)}. "
            f"{verdict.num_lines:,} lines were read"
        )
    if options.json:
        return shown
    whole = f"{'Whole':<10}{verdict.num_lines:,} lines, the last one is {verdict.head}"
    return [*shown, whole, *_where_answers_stand(trail, settings)]


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} lines cannot be shown; expected 1 or more")
    return number


def _check_never_used(trail: AuditTrail, home: Path) -> None:
    """A trail without a line is whole only where nothing was done that it would tell."""
    if not home.is_dir():
        raise ConfigurationError(
            f"there is no state folder {home}; name one with --home or FALAJ_HOME"
        )
    if (home / "feast" / "applied.json").exists():
        raise DataContractError(
            f"the audit trail in {trail.folder} is gone: it has no lines, but definitions were "
            f"applied to the feature store in {home / 'feast'}, which writes some. Look for it in "
            "the copies of the state folder; the next act begins a new trail"
        )


def _where_answers_stand(trail: AuditTrail, settings: Settings) -> list[str]:
    """Whoever looks for an approval in the trail of another use case is sent to the right one."""
    shared = settings.home / "audit"
    if trail.folder == shared or not shared.is_dir():
        return []
    return [f"{'Answers':<10}to promotions, of every use case, stand in {shared}"]


def _as_stored(line: AuditLine) -> str:
    return line.text.decode(errors="backslashreplace")


def _told(line: AuditLine) -> str:
    """One line for people: when, what, on what, how it ended, who."""
    try:
        return _act_told(line.content)
    except (KeyError, TypeError, AttributeError, ValueError):  # it was spoilt
        return f"{line.file} line {line.number} is no audit line: {line.text[:200]!r}"


def _act_told(act: dict[str, Any]) -> str:
    who = act.get("who", {})
    name = who.get("subject") or who.get("user") or "nobody"
    roles = f" ({', '.join(who['roles'])})" if who.get("roles") else ""
    subject = ", ".join(
        ", ".join(value) if isinstance(value, list) else str(value)
        for value in act.get("subject", {}).values()
        if value
    )
    window = act.get("window")
    span = f", {window['start']} to {window['end']}" if window else ""
    rows = f", {act['rows']:,} rows" if "rows" in act else ""
    return (
        f"{act['time'][:19]}Z {act['action']:<16}{act['outcome']:<10} {name}{roles}: "
        f"{subject or json.dumps(act.get('project'))}{span}{rows}"
    )
