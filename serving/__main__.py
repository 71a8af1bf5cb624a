"""The serving process and what is asked of it by hand.

    python -m serving [serve]      serve until SIGTERM; the addresses are printed
    python -m serving status       what serves from the state folder; exit code 3 where nothing does
    python -m serving stop         end it, its requests answered
    python -m serving settings     JSON schemas of its two files: defaults and meanings

The state folder is `FALAJ_HOME` or `--home`, the feature repository `FALAJ_FEATURE_REPO`, whose
`serving.yaml` configures the process. Exit code 2 where something cannot be as it was asked.
"""

import argparse
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import uvloop

from serving.assembly import ComponentsOf, serve
from serving.config import (
    SERVING_FILE,
    LogConfig,
    ServingConfig,
    checked_config,
    read_serving_config,
    registered_model,
)
from serving.observability.logs import json_lines
from serving.security.config import SECURITY_FILE, SecurityConfig
from serving.security.tls import only_tls_1_3
from tasks.contracts.serving import is_served, live_addresses
from tasks.features.access.profile import import_feast
from tasks.governance.handling import addresses
from tasks.governance.policy import require_placements
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.files import temporary_files
from tasks.kernel.process import attempts
from tasks.kernel.settings import Settings

_SPARE_FILES = 256
SWITCH_S = 0.0005
"""The event loop asks for the interpreter after each wait; a thread that writes the log, reads
features or loads a version gives it back so soon. Python's 5 ms would be added to every answer
meanwhile."""


def main(argv: Sequence[str], components_of: Callable[[Settings], ComponentsOf]) -> int:
    """Do what the command line says; 0 where it was done, 2 on a fault, 3 where nothing serves."""
    asked = _parser().parse_args(argv)
    if asked.command == "settings":
        schemas = {SERVING_FILE: ServingConfig.model_json_schema()}
        schemas[str(SECURITY_FILE)] = SecurityConfig.model_json_schema()
        sys.stdout.write(json.dumps(schemas, indent=1) + "\n")
        return 0
    named = {} if asked.home is None else {"FALAJ_HOME": str(asked.home)}
    try:
        settings = Settings.from_environment(os.environ | named)
        if asked.command in ("status", "stop"):
            return _look_or_stop(asked, settings.home)
        config = _config(asked, settings)
        require_placements(settings, addresses(config, os.environ))
        return _serve(config, settings.home, components_of(settings), asked.replica, asked.drain_s)
    except FalajError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m serving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = ("serve", "status", "stop", "settings")
    parser.add_argument("command", nargs="?", default="serve", choices=commands)
    parser.add_argument("--home", type=Path, help="state folder; FALAJ_HOME without it")
    parser.add_argument("--host", help="address that HTTP and gRPC listen on")
    for name in ("http", "grpc", "admin"):
        parser.add_argument(f"--{name}-port", type=int, metavar="PORT", help="0 takes a free one")
    parser.add_argument("--no-grpc", action="store_true", help="HTTP only")
    parser.add_argument(
        "--replica", type=int, default=0, metavar="NUMBER", help="one of several, from 0"
    )
    parser.add_argument(
        "--drain-s", type=float, default=0.0, metavar="SECONDS", help="not ready so long, then end"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="of stop: how long to wait for the end"
    )
    return parser


def _config(asked: argparse.Namespace, settings: Settings) -> ServingConfig:
    config = read_serving_config(settings.feature_repo)
    values: dict[str, Any] = config.model_dump()
    if asked.host is not None:
        values["host"] = asked.host
    for name in ("http", "grpc", "admin"):
        port = getattr(asked, f"{name}_port")
        if port is not None:
            values[name]["port"] = port
    if asked.no_grpc:
        values["grpc"]["enabled"] = False
    config = checked_config(values, "the command line")
    return config if config.models else config.of_models((registered_model(settings),))


def _serve(
    config: ServingConfig, home: Path, components_of: ComponentsOf, number: int, drain_s: float
) -> int:
    _allow_files(config.http.max_connections)
    sys.setswitchinterval(SWITCH_S)

    with _logging(config.observability.logs):
        try:
            uvloop.run(serve(config, home, components_of, number, drain_s))
        finally:
            # What stayed for the time of serving is free to go: else libraries list it as leaked.
            gc.unfreeze()
    return 0


def _logging(config: LogConfig) -> AbstractContextManager[object]:
    """JSON lines for programs; plain ones where a person sits at the terminal."""
    if config.file is not None or not sys.stderr.isatty():
        return json_lines(config)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=config.level, format=form)
    return nullcontext()


def _allow_files(connections: int) -> None:
    """Each connection is an open file, and the usual limit is near the usual number of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigurationError(
            f"http.max_connections={connections} needs {wanted} open files and this process may "
            f"have {hard}; raise the limit (ulimit -Hn) or lower the number. Nothing was started"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _look_or_stop(asked: argparse.Namespace, home: Path) -> int:
    """Show the addresses of the processes that serve from a state folder, or end them."""
    found: list[Any] = live_addresses(home)
    if not found:
        sys.stdout.write(f"nothing serves from {home}\n")
        return 3
    if asked.command == "status":
        sys.stdout.write("".join(json.dumps(one, indent=1) + "\n" for one in found))
        return 0
    for one in found:
        os.kill(int(one["pid"]), signal.SIGTERM)
    named = ", ".join(f"process {one['pid']}" for one in found)
    if all(is_served(home) for _ in attempts(asked.timeout_s, 0.05)):
        raise ConfigurationError(
            f"{named}: not all has ended within {asked.timeout_s:g} s; it was asked to and may "
            "still be answering"
        )
    sys.stdout.write(f"{named}: ended\n")
    return 0


if __name__ == "__main__":
    with temporary_files():
        only_tls_1_3()
        import_feast()
        from serving.components import installed_components

        code = main(sys.argv[1:], installed_components)
    sys.exit(code)
