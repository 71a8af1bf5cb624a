"""One command for the platform: `python -m infra.platform up|down|status|doctor|logs`.

    make up       start Prefect, MLflow and a worker for each hardware class, and deploy; options
                  (UP_ARGS="--port 4300") hold for later starts too, until they are given again
    make down     let runs end, then end all; DOWN_ARGS=--now ends at once
    make status   what runs
    make doctor   what is wrong, and what to do

Exit codes: 0 done, or all well; 1 something is down or failed; 2 wrong usage or configuration; 3 no
platform runs; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from infra.platform.config import kept_options, read_config
from infra.platform.files import PlatformFiles
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.settings import Settings

CONFIG_VARIABLE = "FALAJ_PLATFORM_CONFIG"
EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130
OPTIONS = (
    "profile",
    "host",
    "public_host",
    "port",
    "mlflow_port",
    "serving_port",
    "serving_grpc_port",
    "serving",
    "password",
    "deploying",
)
"""Fields of the configuration that the command line can set; the file can set all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.home:
        os.environ["FALAJ_HOME"] = str(options.home)
    files = PlatformFiles(Settings.from_environment().home)
    try:
        _check_home(files.home)
        return _COMMANDS[options.command](files, options)
    except ConfigurationError as exc:
        return _say(f"refused: {exc}", EXIT_WRONG_INPUT)
    except FalajError as exc:
        return _say(f"failed: {exc}", EXIT_FAILED)
    except KeyboardInterrupt as exc:
        said = str(exc) or _INTERRUPTED.get(options.command, "interrupted")
        return _say(said, EXIT_INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.platform", description="The platform of one state folder."
    )
    parser.add_argument("--home", type=Path, help="state folder (default: .falaj, or FALAJ_HOME)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    up = commands.add_parser(
        "up",
        help="start all; harmless where it runs",
        description="Options are kept for later starts; status shows them.",
    )
    up.add_argument("--config", type=Path, help=f"YAML file (default: {CONFIG_VARIABLE}, or none)")
    up.add_argument("--profile", choices=("embedded", "server"))
    up.add_argument("--host", help="IP address to listen on (default: 127.0.0.1)")
    up.add_argument("--public-host", help="name by which browsers reach this machine")
    up.add_argument("--port", type=int, help="Prefect's port (default: 4200; 0: any free)")
    up.add_argument("--mlflow-port", type=int, help="MLflow's port (default: 5000; 0: any free)")
    up.add_argument("--serving-port", type=int, help="inference server's (default: 8000)")
    up.add_argument("--serving-grpc-port", type=int, help="its gRPC's port (default: 8001)")
    up.add_argument("--serving", action=argparse.BooleanOptionalAction)
    up.add_argument("--password", action=argparse.BooleanOptionalAction)
    up.add_argument("--reset", action="store_true", help="drop the options of earlier starts")
    up.add_argument("--deploying", help=argparse.SUPPRESS)
    down = commands.add_parser("down", help="let runs end, then end all")
    down.add_argument("--now", action="store_true", help="wait for no run; mark what is cut off")
    down.add_argument("--limit", type=float, help="seconds to wait for runs")
    for name, said in (("status", "what runs"), ("doctor", "what is wrong, and what to do")):
        commands.add_parser(name, help=said).add_argument("--json", action="store_true")
    logs = commands.add_parser("logs", help="the last lines of a service's log")
    logs.add_argument("service", nargs="?", default="supervisor")
    logs.add_argument("--lines", type=int, default=50)
    commands.add_parser("supervise", help="be the supervisor, in the foreground (for an init)")
    return parser


def _up(files: PlatformFiles, options: argparse.Namespace) -> int:
    from infra.platform.lifecycle import bring_up

    chosen = options.config or os.environ.get(CONFIG_VARIABLE)
    given = {name: getattr(options, name) for name in OPTIONS}
    kept = {} if options.reset else kept_options(files)
    config = read_config(Path(chosen) if chosen else None, given, kept)
    bring_up(files, config, dict(os.environ))
    return 0


def _down(files: PlatformFiles, options: argparse.Namespace) -> int:
    from infra.platform.lifecycle import bring_down

    bring_down(files, at_once=options.now, limit_s=options.limit)
    return 0


def _status(files: PlatformFiles, options: argparse.Namespace) -> int:
    from infra.platform.health import read_status, table

    status = read_status(files)
    print(status.model_dump_json(indent=1) if options.json else table(status))
    return status.exit_code


def _doctor(files: PlatformFiles, options: argparse.Namespace) -> int:
    from infra.platform.health import examine, exit_code, report

    findings = examine(files, os.environ)
    as_json = options.json
    print(json.dumps([asdict(f) for f in findings], indent=1) if as_json else report(findings))
    return exit_code(findings)


def _logs(files: PlatformFiles, options: argparse.Namespace) -> int:
    from infra.platform.lifecycle import log_lines

    print("\n".join(log_lines(files, options.service, options.lines)))
    return 0


def _supervise(files: PlatformFiles, options: argparse.Namespace) -> int:
    from infra.platform.services import supervise

    supervise(files)
    return 0


def _check_home(home: Path) -> None:
    """Refuse what can be no state folder.

    Raises:
        ConfigurationError: it, or something above it, is no folder or is closed to this user.
    """
    existing = next(folder for folder in (home, *home.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.X_OK):
        what = "may not be read by this user" if existing.is_dir() else "is no folder"
        raise ConfigurationError(
            f"{existing} {what}, so {home} cannot be the state folder; name another one with "
            "FALAJ_HOME or --home"
        )


def _say(sentence: str, code: int) -> int:
    sys.stdout.flush()
    print(sentence, file=sys.stderr)
    return code


_COMMANDS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "doctor": _doctor,
    "logs": _logs,
    "supervise": _supervise,
}

_INTERRUPTED = {
    "up": "interrupted; the supervisor goes on: make status shows it, make down ends it",
    "down": "interrupted; the platform runs on as before",
}

if __name__ == "__main__":
    sys.exit(main())
