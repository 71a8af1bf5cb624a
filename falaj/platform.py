"""Commands of the platform of one state folder, and of what is deployed to it."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from falaj.context import EXIT_FAILED, AsJson, Context, Here
from infra.orchestration.client import platform_environment
from infra.platform.config import CONFIG_VARIABLE, kept_options, read_config
from infra.platform.files import PlatformFiles
from tasks.kernel.errors import ConfigurationError


def up(
    *,
    config: Path | None = None,
    profile: Literal["embedded", "server"] | None = None,
    host: str | None = None,
    port: int | None = None,
    mlflow_port: int | None = None,
    serving_port: int | None = None,
    serving_grpc_port: int | None = None,
    serving: Annotated[bool | None, Parameter(negative="--no-serving")] = None,
    password: Annotated[bool | None, Parameter(negative="--no-password")] = None,
    reset: bool = False,
    deploying: Annotated[str | None, Parameter(show=False)] = None,
    context: Here,
) -> None:
    """Start the platform and deploy; harmless where it runs.

    Options are kept for later starts; `status` shows them.

    Args:
        config: YAML file (default: FALAJ_PLATFORM_CONFIG, or none).
        profile: Where its databases are.
        host: IP address to listen on (default: 127.0.0.1).
        port: Prefect's port (default: 4200; 0: any free).
        mlflow_port: MLflow's port (default: 5000; 0: any free).
        serving_port: The inference server's port (default: 8000).
        serving_grpc_port: Its port of gRPC (default: 8001).
        serving: Serve models too.
        password: Protect Prefect and MLflow with a password.
        reset: Drop the options of earlier starts.
        deploying: for tests.
    """
    from infra.platform.lifecycle import bring_up

    files = _files(context)
    chosen = config or os.environ.get(CONFIG_VARIABLE)
    given = {
        "profile": profile,
        "host": host,
        "port": port,
        "mlflow_port": mlflow_port,
        "serving_port": serving_port,
        "serving_grpc_port": serving_grpc_port,
        "serving": serving,
        "password": password,
        "deploying": deploying,
    }
    kept = {} if reset else kept_options(files)
    full = read_config(Path(chosen) if chosen else None, given, kept)
    # The supervisor outlives this command, and with it the command's folder of temporary files.
    environment = {**os.environ, "TMPDIR": str(Path(tempfile.gettempdir()).parent)}
    try:
        bring_up(files, full, environment)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(
            str(exc)
            or "interrupted; the supervisor runs on: make status shows it, make down ends it"
        ) from exc


def down(*, now: bool = False, limit: float | None = None, context: Here) -> None:
    """Let runs end, then stop the platform.

    Args:
        now: Wait for no run; mark what is cut off.
        limit: Seconds to wait for runs.
    """
    from infra.platform.lifecycle import bring_down

    files = _files(context)
    try:
        bring_down(files, at_once=now, limit_s=limit)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(str(exc) or "interrupted; the platform runs on as before") from exc


def status(*, as_json: AsJson = False, context: Here) -> int:
    """Show what runs; exit code 1 where something is down, 3 where no platform runs."""
    from infra.platform.health import read_status, table

    found = read_status(_files(context))
    print(found.model_dump_json(indent=1) if as_json else table(found))
    return found.exit_code


def doctor(*, as_json: AsJson = False, context: Here) -> int:
    """Find what is wrong with the platform, and what to do; exit code 1 where something is."""
    from infra.platform.health import examine, exit_code, report

    findings = examine(_files(context), os.environ)
    print(json.dumps([asdict(f) for f in findings], indent=1) if as_json else report(findings))
    return exit_code(findings)


def logs(service: str = "supervisor", /, *, lines: int = 50, context: Here) -> None:
    """Show the last lines of a service's log."""
    from infra.platform.lifecycle import log_lines

    print("\n".join(log_lines(_files(context), service, lines)))


def supervise(*, context: Here) -> None:
    """Be the supervisor, in the foreground (for an init system)."""
    from infra.platform.services import supervise as run_supervisor

    run_supervisor(_files(context))


def deploy(
    *,
    check: bool = False,
    pools: Literal["process", "kubernetes"] = "process",
    wait: float = 0,
    file: Path | None = None,
    resume: bool = False,
    prune: bool = False,
    context: Here,
) -> int:
    """Write what differs from the files, leave equal things alone, and read all back.

    The use cases are those of --repo, which may be repeated as PATH[=PATH_ON_WORKERS]; the first
    has plain deployment names. Without it: FALAJ_FEATURE_REPOS, separated by colons, or the one of
    FALAJ_FEATURE_REPO. Exit code 1 where something differs.

    Args:
        check: Only compare; changes nothing.
        pools: Kind of work pools.
        wait: Seconds, for a server that is starting; the files are read meanwhile.
        file: Instead of prefect.yaml.
        resume: Switch on again what people have paused.
        prune: Remove deployments and automations of ours that the files no longer have.
    """
    if not os.environ.get("PREFECT_API_URL"):  # Prefect reads it when it is imported
        environment = platform_environment(context.home)
        if environment is None:
            raise ConfigurationError(
                "no platform runs on this state folder and PREFECT_API_URL is not set; start one "
                "with `make up`, or name a server. Nothing was deployed"
            )
        os.environ.update(environment)
    from infra.deploying.deploy import make_plan, run
    from infra.deploying.file import PREFECT_FILE

    plan = make_plan(context.repos, file=file or PREFECT_FILE, pool_type=pools, resume=resume)
    outcome = run(plan, wait, only_check=check, prune=prune)
    columns = {
        "written": outcome.written,
        "differs": outcome.differences,
        "note": sorted(set(outcome.notes)),
    }
    for name, lines in columns.items():
        for line in lines:
            print(f"{name:<11}{line}")
    print(
        f"{len(outcome.equal)} as the files say, {len(outcome.written)} written, "
        f"{len(outcome.differences)} differences"
    )
    return EXIT_FAILED if outcome.differences else 0


serve = App(name="serve", help_flags=[])


@serve.default
def _serve(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Become `python -m serving`, which knows the commands serve, status, stop, docs, settings."""
    os.execv(sys.executable, [sys.executable, "-m", "serving", *words])


def _files(context: Context) -> PlatformFiles:
    """The platform's files.

    Raises:
        ConfigurationError: the state folder, or one above it, is no folder or closed to this user.
    """
    home = context.home
    existing = next(folder for folder in (home, *home.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.X_OK):
        what = "may not be read by this user" if existing.is_dir() else "is no folder"
        raise ConfigurationError(
            f"{existing} {what}, so {home} cannot be the state folder; name another one with "
            "FALAJ_HOME or --home"
        )
    return PlatformFiles(home)
