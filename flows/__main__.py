"""Command line: `python -m flows <command>`; `make run` is `python -m flows run`.

Exit codes: 0 done, 1 a stage failed, 2 wrong usage, configuration or data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flows.approve_command import add_approve_commands, answer_candidate
from flows.bless_command import add_bless_command, bless_window
from flows.decisions_command import add_decisions_command, show_decisions
from flows.feature_commands import (
    add_feature_commands,
    forget_features,
    rebuild_features,
    serve_features,
    show_audit,
)
from flows.import_command import add_import_command, read_description, run_import
from flows.predictions_command import add_predictions_command, run_predictions
from flows.recalibrate_command import add_recalibrate_command, recalibrate
from flows.release_command import add_release_command, change_release
from flows.retry_argument import add_retry_command
from flows.search_command import add_search_command, run_search
from flows.shrink_command import add_shrink_command, run_shrink
from flows.withdraw_command import add_withdraw_command, withdraw_version
from infra.orchestration.client import running_platform
from infra.orchestration.embedded import (
    client_environment,
    disk_with_space,
    free_port,
    only_run,
    prefect_server,
    send_what_is_left,
    wait_until_ready,
)
from tasks.contracts.base import TimeWindow
from tasks.features.checks.reports import ViewParity
from tasks.kernel.errors import (
    ConfigurationError,
    DataContractError,
    FalajError,
    FeatureStoreError,
    RegistryError,
    WindowError,
)
from tasks.kernel.scratch import temporary_files
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, Settings

if TYPE_CHECKING:
    from flows.config import PipelineConfig
    from tasks.contracts.drift import DriftReport

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.home:
        os.environ["FALAJ_HOME"] = str(options.home)
    if options.repo:
        os.environ["FALAJ_FEATURE_REPO"] = str(options.repo)
    started = time.monotonic()
    try:
        settings = Settings.from_environment()
        if options.command in _READERS:
            _tell(*_READERS[options.command](options, settings))
            return 0
        lines = _run(options, settings)
    except (ConfigurationError, DataContractError) as exc:
        _let_go(exc)
        return _say(f"refused: {exc}", EXIT_WRONG_INPUT)
    except FalajError as exc:
        _let_go(exc)
        return _say(f"failed: {type(exc).__name__}: {exc}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted; finished stages are kept, run again to go on", EXIT_INTERRUPTED)
    _tell(*lines, f"{'Done':<10}in {time.monotonic() - started:.0f} s")
    return 0


def _let_go(exc: BaseException | None) -> None:
    """Free what the frames of an error hold: Prefect keeps the error until Python ends.

    A DuckDB connection held until then is listed as leaked, in forty lines below the sentence.
    """
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows", description="Run Falaj's flows.")
    parser.add_argument("--home", type=Path, help="state folder (default: .falaj, or FALAJ_HOME)")
    parser.add_argument(
        "--repo", type=Path, help=f"feature repository (default: {DEFAULT_FEATURE_REPO})"
    )
    parser.add_argument(
        "--on-platform", action="store_true", help="run on the server of the platform (make up)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("run", help="the whole loop once, ending with a report")
    refresh = commands.add_parser("refresh", help="refresh the features of one window")
    drift = commands.add_parser("drift", help="compare one window with the training reference")
    drift.add_argument(
        "--served",
        action="store_true",
        help="compare what was served (the prediction log) instead; START and END may then be left "
        "out for the newest complete days",
    )
    for command, number in ((refresh, None), (drift, "?")):
        command.add_argument("start", nargs=number, help="first moment, such as 2013-01-01T05:00Z")
        command.add_argument("end", nargs=number, help="first moment after the window")
    commands.add_parser("train", help="train, judge and register a candidate")
    add_recalibrate_command(commands)
    add_search_command(commands)
    add_shrink_command(commands)
    add_import_command(commands)
    commands.add_parser("parity", help="compare online features with offline ones")
    verify = commands.add_parser("verify", help="make a training snapshot again from its pins")
    verify.add_argument("snapshot", help="beginning of its digest, as the report shows it")
    trace = commands.add_parser("trace", help="show what something was made from, to the raw files")
    trace.add_argument("thing", help="beginning of a digest, or a name such as models/<name>/1")
    add_feature_commands(commands)
    add_bless_command(commands)
    add_retry_command(commands)
    add_decisions_command(commands)
    add_predictions_command(commands)
    add_approve_commands(commands)
    add_withdraw_command(commands)
    add_release_command(commands)
    commands.add_parser("docs", help="bring the data docs of all validations up to date")
    commands.add_parser("ui", help="serve the Prefect UI of the state folder until interrupted")
    return parser


def _run(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Run the command against a Prefect API; return what to tell the person at the end."""
    has_window = hasattr(options, "start") and not (
        getattr(options, "served", False) and options.start is None
    )
    window = _window(options) if has_window else None
    if options.command == "import":
        read_description(options)
    config = None if options.command == "ui" else _configuration(options, settings)
    with ExitStack() as stack:
        stack.enter_context(disk_with_space(settings.home))
        stack.enter_context(only_run(settings.home))
        if options.on_platform:
            os.environ.update(running_platform(settings.home))
        if "PREFECT_API_URL" in os.environ:
            if config is None:
                raise ConfigurationError(
                    f"the server {os.environ['PREFECT_API_URL']} serves its own UI; open that, or "
                    "unset PREFECT_API_URL to see the runs of the state folder"
                )
            return _run_flow(options, config, window, settings)
        port = free_port()
        server = stack.enter_context(prefect_server(settings.home, port))
        os.environ.update(client_environment(settings.home, port))
        if config is not None:
            import flows.pipeline  # noqa: F401  (takes seconds: do it while the server starts)

            if not settings.store.root.exists():  # a first run will need these too
                # Feast turns on warnings that the import of Great Expectations would then give.
                import tasks.validation.runner

                # isort: split
                import tasks.features.online.materialization  # noqa: F401
        wait_until_ready(server, settings.home, port)
        if config is None:
            _tell(f"Prefect UI at http://127.0.0.1:{port} - Ctrl-C ends it")
            server.wait()
            return []
        from infra.orchestration.retry import end_lost_runs

        end_lost_runs()
        return _run_flow(options, config, window, settings, watched=False)


def _configuration(options: argparse.Namespace, settings: Settings) -> PipelineConfig:
    """What the feature repository describes, read before a server is started for nothing."""
    from flows.config import check_repository, read_pipeline_config

    config = read_pipeline_config(settings.feature_repo)
    if options.command not in _WITHOUT_DATA:
        check_repository(config, settings.feature_repo)
    return config


def _run_flow(
    options: argparse.Namespace,
    config: PipelineConfig,
    window: TimeWindow | None,
    settings: Settings,
    *,
    watched: bool = True,
) -> list[str]:
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from infra.orchestration.retry import retry_run

    # On a server of its own nobody watches heartbeats, and their thread delays the end of each flow
    # by a second.
    quiet = {} if watched else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with temporary_settings(quiet):
        try:
            if options.command == "retry":
                return retry_run(options)
            if options.command == "search":
                return run_search(config, options, settings)
            if options.command == "shrink":
                return run_shrink(config, options, settings)
            if options.command == "import":
                return run_import(options)
            if options.command == "drift" and options.served:
                return _drift_served(config, window)
            return _COMMANDS[options.command](config, window, settings)
        finally:
            send_what_is_left()


def _loop(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.approval import promotion_outcome
    from flows.pipeline import pipeline_flow

    record = pipeline_flow(config)
    overall, quality = record.evaluation.overall, record.evaluation.overall.primary
    yardstick = record.evaluation.yardstick.primary
    kept = ", ".join(v.name for v in record.variants if v.kept) or "none"
    latest = settings.reports / "latest"
    return [
        "",
        f"{'Model':<10}{promotion_outcome(record.promotion)}",
        f"{overall.primary_name:<10}{quality.value:.4f} [{quality.low:.4f}, {quality.high:.4f}] on "
        f"{record.evaluation.overall.num_rows:,} test rows; {record.evaluation.yardstick_name} "
        f"{yardstick.value:.4f}",
        f"{'Variants':<10}{kept}",
        f"{'Drift':<10}{record.drift.verdict} in {record.drift.current}",
        f"{'Report':<10}{latest / 'report.html'}",
        f"{'Facts':<10}{latest / 'report.json'}",
    ]


def _refresh(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.feature_refresh import feature_refresh_flow

    assert window is not None
    refreshed = feature_refresh_flow(window, config)
    return [
        f"{view.name:<20}{view.num_entities:>8,} entities online up to {view.watermark:%F %RZ}"
        for view in refreshed.views
    ]


def _drift(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.drift_check import drift_check_flow

    assert window is not None
    report = _compared(drift_check_flow(window, config), config)
    return [f"{'Drift':<10}{report.verdict} in {report.current}", *report.evidence]


def _compared(report: DriftReport | None, config: PipelineConfig) -> DriftReport:
    """What a drift check found, which a person asked for."""
    if report is None:
        raise RegistryError(
            f"{config.registry.model_name} has no version to compare with; train a first one: "
            "`python -m flows run`"
        )
    return report


def _drift_served(config: PipelineConfig, window: TimeWindow | None) -> list[str]:
    from flows.drift_check import drift_check_log_flow
    from tasks.contracts.predictions import TooFewPredictions

    found = drift_check_log_flow(window, config)
    if isinstance(found, TooFewPredictions):
        return [f"{'Drift':<10}no verdict for {found.window}", found.reason]
    report = _compared(found, config)
    return [f"{'Drift':<10}{report.verdict} in {report.current}", *report.evidence]


def _train(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.training import training_flow
    from tasks.reporting.training_cost import cost_told

    trained = training_flow(config)
    version, model = trained.version, trained.model
    lines = [f"{'Model':<10}{version.name} version {version.version} is the candidate"]
    if model.telemetry is not None:
        lines.append(f"{'Training':<10}{cost_told(model.telemetry)}")
        if model.telemetry.diagnosis is not None:
            lines.append(f"{'Diagnosis':<10}{model.telemetry.diagnosis.summary}")
    files = [settings.store.path(artifact) for artifact in (model.log, *model.kept)]
    return lines + [f"{file.name}: {file}" for file in files]


def _parity(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.parity_check import difference, parity_check_flow

    report = parity_check_flow(config)
    if report.verdict != "equal":
        raise difference(report)
    return [_parity_line(view) for view in report.views]


def _parity_line(view: ViewParity) -> str:
    has_values = view.num_values > view.num_null
    verdict = "equal online and offline" if has_values else "nothing to compare"
    return (
        f"{view.view:<20}{verdict} at {view.watermark:%F %RZ}: {view.num_values:,} values of "
        f"{view.num_entities:,} entities compared, {view.num_null:,} of them null on both sides; "
        f"{view.num_stale:,} entities too old by then"
    )


def _verify(options: argparse.Namespace, settings: Settings) -> list[str]:
    from tasks.features.checks.verification import find_snapshot, verify_snapshot

    snapshot = find_snapshot(options.snapshot, settings.store)
    outcome = verify_snapshot(
        snapshot, settings.features_home, settings.feature_repo, settings.store
    )
    if not outcome.same:
        raise FeatureStoreError(
            f"snapshot {snapshot.data.sha256[:12]} does not come out of its pins: "
            f"{'; '.join(outcome.differences)}. Nothing was changed"
        )
    return [
        f"{'Same':<10}{snapshot.data.sha256}",
        f"{'Made of':<10}{snapshot.num_rows:,} rows of {snapshot.window}",
        *(f"{'Since':<10}{remark}" for remark in outcome.remarks),
    ]


def _trace(options: argparse.Namespace, settings: Settings) -> list[str]:
    from tasks.lineage.journal import Journal
    from tasks.lineage.trace import tell, trace

    chain = trace(options.thing, Journal(settings.home / "lineage"))
    return [*tell(chain), "", *(f"{'From':<10}{d.name} {d.version}" for d in chain.sources())]


def _bless(options: argparse.Namespace, settings: Settings) -> list[str]:
    return bless_window(_window(options), options, settings)


def _docs(options: argparse.Namespace, settings: Settings) -> list[str]:
    from tasks.validation.docs import build_site

    site = build_site(settings.store, settings.home, budget_s=float("inf"))
    return [f"{'Data docs':<10}{site.index} with {site.num_pages} results"]


_READERS: dict[str, Callable[[argparse.Namespace, Settings], list[str]]] = {
    "verify": _verify,
    "trace": _trace,
    "bless": _bless,
    "decisions": show_decisions,
    "predictions": run_predictions,
    "approve": answer_candidate,
    "reject": answer_candidate,
    "withdraw": withdraw_version,
    "release": change_release,
    "docs": _docs,
    "audit": show_audit,
    "serve-features": serve_features,
    "rebuild-features": rebuild_features,
    "forget-features": forget_features,
}
"""Commands that run no flow: they need no Prefect, and no run keeps them waiting."""

_WITHOUT_DATA = ("retry", "import")
"""Flow commands that read no suite or query of the feature repository by themselves."""

_COMMANDS: dict[str, Callable[..., list[str]]] = {
    "run": _loop,
    "refresh": _refresh,
    "drift": _drift,
    "train": _train,
    "recalibrate": recalibrate,
    "parity": _parity,
}


def _window(options: argparse.Namespace) -> TimeWindow:
    """The window of the command line.

    Raises:
        WindowError: a moment is no date, has no zone, or the window is reversed or empty.
    """
    moments: dict[str, Any] = {}
    for name in ("start", "end"):
        text = getattr(options, name) or ""
        try:
            moments[name] = datetime.fromisoformat(text)
        except ValueError as exc:
            raise WindowError(
                f"{text!r} is no date and time; write it as 2013-01-01T05:00Z. Nothing was touched"
            ) from exc
    try:
        return TimeWindow(**moments)
    except ValidationError as exc:
        raise WindowError(exc.errors()[0]["msg"].removeprefix("Value error, ")) from exc


def _tell(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"\n{sentence}\n")
    return code


if __name__ == "__main__":
    with temporary_files():
        code = main()
    sys.exit(code)
