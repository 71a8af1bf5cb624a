"""Commands of the feature store: refresh, compare, serve, repair."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from falaj.context import DryRun, End, Here, Last, Shown, Start, chosen_window, required_window, row
from flows.config import PipelineConfig, check_repository, read_pipeline_config
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import MaterializedView
from tasks.governance.handling import Placement
from tasks.governance.policy import require_placements
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, TransientError
from tasks.kernel.files import private_folder
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT, Settings

if TYPE_CHECKING:
    from tasks.features.access.server import Listening
    from tasks.features.checks.report import ViewParity

UNSAFE = ("INTRA_COMMUNICATION_BASE64",)
"""Whoever knows this value would pass every check of Feast's, without a signature."""
app = App(name="features")


@app.command
def refresh(
    start: Start | None = None,
    end: End | None = None,
    /,
    *,
    last: Last | None = None,
    dry_run: DryRun = False,
    context: Here,
) -> Shown:
    """Refresh the features of one window.

    Examples:
        falaj features refresh 2013-01-01T05:00Z 2013-02-01T05:00Z
        falaj features refresh --last 48h --dry-run
    """
    from falaj.session import run_flow

    def work(config: PipelineConfig) -> Shown:
        from flows.feature_refresh import feature_refresh_flow

        found = feature_refresh_flow(window(config), config)
        return Shown(found, _online(found.views))

    def window(config: PipelineConfig) -> TimeWindow:
        chosen = chosen_window(start, end, last, config.clock)
        return required_window(chosen, "features refresh")

    if last is None:
        required_window(chosen_window(start, end, None), "features refresh")
    if not dry_run:
        return run_flow(context, work)
    config = read_pipeline_config(context.settings.feature_repo)
    check_repository(config, context.settings.feature_repo)
    return _what_a_refresh_does(config, window(config), context.settings)


def _online(views: Iterable[MaterializedView]) -> list[str]:
    return [
        f"{view.name:<20}{view.num_entities:>8,} entities online up to {view.watermark:%F %RZ}"
        for view in views
    ]


def _what_a_refresh_does(config: PipelineConfig, window: TimeWindow, settings: Settings) -> Shown:
    from tasks.features.tables.ledger import load_ledger

    ledger, features = load_ledger(settings.features_home), config.features
    online = ledger.views if ledger else ()
    reads = {table.name: table.uri for table in features.raw_tables}
    builds = [table.name for table in features.feature_tables]
    lines = [
        row("Window", window),
        *(row("Reads", f"{name}: {uri}") for name, uri in reads.items()),
        row("Builds", ", ".join(builds)),
        row("Now", "nothing is online yet" if ledger is None else "online are"),
        *_online(online),
        "Nothing was changed",
    ]
    return Shown({"window": window, "reads": reads, "builds": builds, "online": online}, lines)


@app.command
def parity(*, context: Here) -> Shown:
    """Compare online features with offline ones; they differ: exit code 1.

    Examples:
        falaj features parity
    """
    from falaj.session import run_flow

    def work(config: PipelineConfig) -> Shown:
        from flows.feature_refresh import difference, parity_check_flow

        report = parity_check_flow(config)
        if report.result != "equal":
            raise difference(report)
        return Shown(report, [parity_line(view) for view in report.views])

    return run_flow(context, work)


def parity_line(view: ViewParity) -> str:
    """One feature view in a line; a view with no values at all is not called equal."""
    has_values = view.num_values > view.num_null
    result = "equal online and offline" if has_values else "nothing to compare"
    return (
        f"{view.view:<20}{result} at {view.watermark:%F %RZ}: {view.num_values:,} values of "
        f"{view.num_entities:,} entities compared, {view.num_null:,} of them null on both sides; "
        f"{view.num_stale:,} entities too old by then"
    )


@app.command
def verify(snapshot: str, /, *, context: Here) -> Shown:
    """Build a training snapshot again from its pins, and compare.

    Args:
        snapshot: Beginning of its digest, as the report shows it.

    Examples:
        falaj features verify 3f2a91
    """
    from tasks.features.checks.verification import find_snapshot, verify_snapshot

    settings = context.settings
    found = find_snapshot(snapshot, settings.store)
    outcome = verify_snapshot(found, settings)
    if not outcome.same:
        raise FeatureStoreError(
            f"snapshot {found.data.sha256[:12]} does not come out of its pins: "
            f"{'; '.join(outcome.differences)}. Nothing was changed"
        )
    lines = [
        row("Same", found.data.sha256),
        row("Made of", f"{found.num_rows:,} rows of {found.window}"),
        *(row("Since", remark) for remark in outcome.remarks),
    ]
    return Shown({"snapshot": found, "outcome": outcome}, lines)


@app.command
def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 6566,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    context: Here,
) -> None:
    """Serve online features over HTTP to callers with OIDC tokens, until interrupted.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        tls_cert: Certificate, needed outside of loopback.
        tls_key: Its key.

    Raises:
        ConfigurationError: the server refused to start: no issuer, no permissions, no encryption.
        TransientError: the server ended.

    Examples:
        falaj features serve --port 6566
    """
    from tasks.features.access.server import Listening

    require_placements(
        context.settings, [Placement("online features", f"https://{host}", "--host")]
    )
    with feature_server(context.settings, Listening(host, port, tls_cert, tls_key)) as process:
        sys.stdout.write(f"online    {host}:{port}\nCtrl-C ends it\n")
        sys.stdout.flush()
        process.wait()
    log = context.home / "feast" / "servers" / "online.log"
    raise TransientError(f"the feature server ended; its log is {log}")


@contextmanager
def feature_server(settings: Settings, at: Listening) -> Iterator[subprocess.Popen[bytes]]:
    """Start Feast's server under the guard and wait until it takes connections; stop it in the end.

    Args:
        settings: state folder, feature repository and profile to serve.
        at: where it listens.

    Raises:
        ConfigurationError: there is no issuer, the address is open, or the server refused to start.
        TransientError: the server ended or did not answer in time.
    """
    from tasks.features.access.server import EXIT_REFUSED, oidc_settings

    oidc_settings(os.environ)
    at.check()
    folder = private_folder(settings.home / "feast" / "servers")
    log = folder / "online.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tasks.features.access.server", at.host, str(at.port)]
    if at.certificate and at.key:
        command += ["--tls-cert", str(at.certificate), "--tls-key", str(at.key)]
    environment = {name: value for name, value in os.environ.items() if name not in UNSAFE}
    environment |= {
        "HOME": str(folder),  # libraries keep their files there
        "FALAJ_HOME": str(settings.home),
        "FALAJ_FEATURE_REPO": str(settings.feature_repo),
        "FALAJ_PROFILE": settings.profile,
    }
    with guarded_process(command, log, environment, folder=PROJECT_ROOT) as process:
        try:
            wait_until_ready(process, lambda: _listens(at), "the feature server", log, 180)
        except TransientError as exc:
            lines = log.read_text(errors="replace").strip().splitlines()
            if process.returncode == EXIT_REFUSED and lines:
                raise ConfigurationError(lines[-1].removeprefix("refused: ")) from exc
            raise
        yield process


def _listens(at: Listening) -> bool:
    with suppress(OSError), socket.create_connection((at.host, at.port), timeout=2):
        return True
    return False


@app.command
def rebuild(*view: str, pushed: bool = False, context: Here) -> Shown:
    """Write feature views online again, from the published tables up to what is online.

    Args:
        view: Feature views (default: all that are online).
        pushed: Also remove what was pushed.

    Raises:
        ConfigurationError: there is no such view, or a run is under way.
        FeatureStoreError: nothing is online yet.

    Examples:
        falaj features rebuild
        falaj features rebuild weather
    """
    from infra.orchestration.embedded import only_run
    from tasks.features.online.materialization import rebuild_views
    from tasks.features.tables.build import current_tables

    settings = context.settings
    with only_run(settings.home):
        tables = current_tables(settings.features_home, settings.store)
        written = rebuild_views(tables, view, settings, pushed=pushed)
    lines = [f"{name:<20}{n:>8,} entities written from its table" for name, n in written.items()]
    return Shown({"entities_written": written}, lines)


@app.command
def forget(
    *view: str, key: list[str] | None = None, feature: list[str] | None = None, context: Here
) -> Shown:
    """Remove values online; what the tables hold of them comes back with `features rebuild`.

    Args:
        view: Feature views (default: all of the entity's kind).
        key: One entity by its join key, as NAME=VALUE; repeat it for a composite key.
        feature: This feature alone; may be repeated.

    Raises:
        ConfigurationError: a view, key or feature is not there, or a run is under way.

    Examples:
        falaj features forget plane_history --key tailnum=N14228
    """
    from infra.orchestration.embedded import only_run
    from tasks.features.online.materialization import forget_values

    settings = context.settings
    if unclear := [text for text in key or [] if "=" not in text]:
        raise ConfigurationError(
            f"--key {unclear[0]} names no value; write it as NAME=VALUE. Nothing was changed"
        )
    entity = dict(text.split("=", 1) for text in key or [])
    with only_run(settings.home):
        found = forget_values(view, entity, feature or [], settings)
    lines = [f"{name:<20}{number:>8,} entities forgotten" for name, number in found.items()]
    lines.append("what the tables hold of them comes back with `features rebuild`")
    return Shown({"entities_forgotten": found}, lines)
