"""Command line: `python -m flows <command>`; `make run` is `python -m flows run`.

Exit codes: 0 done, 1 a stage failed, 2 wrong usage, configuration or data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flows.embedded import (
    client_environment,
    free_port,
    only_run,
    prefect_server,
    send_what_is_left,
    wait_until_ready,
)
from tasks.contracts import TimeWindow
from tasks.errors import ConfigurationError, DataContractError, FalajError, WindowError
from tasks.settings import Settings

if TYPE_CHECKING:
    from flows.config import PipelineConfig

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
        lines = _run(options, Settings.from_environment())
    except (ConfigurationError, DataContractError) as exc:
        return _say(f"refused: {exc}", EXIT_WRONG_INPUT)
    except FalajError as exc:
        return _say(f"failed: {type(exc).__name__}: {exc}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted; finished stages are kept, run again to go on", EXIT_INTERRUPTED)
    _tell(*lines, f"{'Done':<10}in {time.monotonic() - started:.0f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows", description="Run Falaj's flows.")
    parser.add_argument("--home", type=Path, help="state folder (default: .falaj, or FALAJ_HOME)")
    parser.add_argument("--repo", type=Path, help="feature repository (default: feature_repo)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("run", help="the whole loop once, ending with a report")
    refresh = commands.add_parser("refresh", help="refresh the features of one window")
    drift = commands.add_parser("drift", help="compare one window with the training reference")
    for command in (refresh, drift):
        command.add_argument("start", help="first moment, such as 2013-01-01T05:00Z")
        command.add_argument("end", help="first moment after the window")
    commands.add_parser("train", help="train, judge and register a candidate")
    commands.add_parser("ui", help="serve the Prefect UI of the state folder until interrupted")
    return parser


def _run(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Run the command against a Prefect API; return what to tell the person at the end."""
    window = _window(options) if options.command in ("refresh", "drift") else None
    with ExitStack() as stack:
        stack.enter_context(only_run(settings.home))
        if "PREFECT_API_URL" in os.environ:
            return _run_flow(options.command, window, settings)
        port = free_port()
        server = stack.enter_context(prefect_server(settings.home, port))
        os.environ.update(client_environment(settings.home, port))
        if options.command != "ui":
            import flows.pipeline  # noqa: F401  (takes seconds: do it while the server starts)

            if not settings.store.root.exists():  # a first run will need these too
                import tasks.features.materialization
                import tasks.validation.runner  # noqa: F401
        wait_until_ready(server, settings.home, port)
        if options.command == "ui":
            _tell(f"Prefect UI at http://127.0.0.1:{port} - Ctrl-C ends it")
            server.wait()
            return []
        return _run_flow(options.command, window, settings)


def _run_flow(command: str, window: TimeWindow | None, settings: Settings) -> list[str]:
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.config import read_pipeline_config

    config = read_pipeline_config(settings.feature_repo)
    # Nobody watches heartbeats here, and their thread delays the end of each flow by a second.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            return _COMMANDS[command](config, window, settings)
        finally:
            send_what_is_left()


def _loop(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.pipeline import pipeline_flow

    record = pipeline_flow(config)
    auc, yardstick = record.evaluation.overall.auc, record.evaluation.yardstick.auc
    kept = ", ".join(v.name for v in record.variants if v.kept) or "none"
    closed = ", ".join(g.name for g in record.promotion.gates if not g.passed)
    state = "is the champion" if record.promotion.promoted else f"was refused by gate {closed}"
    latest = settings.reports / "latest"
    return [
        "",
        f"{'Model':<10}{record.version.name} version {record.version.version} {state}",
        f"{'AUC':<10}{auc.value:.4f} [{auc.low:.4f}, {auc.high:.4f}] on "
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
    report = drift_check_flow(window, config)
    return [f"{'Drift':<10}{report.verdict} in {report.current}", *report.evidence]


def _train(config: PipelineConfig, window: TimeWindow | None, settings: Settings) -> list[str]:
    from flows.training import training_flow

    version = training_flow(config).version
    return [f"{'Model':<10}{version.name} version {version.version} is the candidate"]


_COMMANDS: dict[str, Callable[..., list[str]]] = {
    "run": _loop,
    "refresh": _refresh,
    "drift": _drift,
    "train": _train,
}


def _window(options: argparse.Namespace) -> TimeWindow:
    """The window of the command line.

    Raises:
        WindowError: a moment is no date, has no zone, or the window is reversed or empty.
    """
    moments: dict[str, Any] = {}
    for name in ("start", "end"):
        text = getattr(options, name)
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


def _silence_exit() -> None:
    """DuckDB's binding lists "leaks" on standard error while the interpreter goes down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    atexit.register(_silence_exit)
    sys.exit(main())
