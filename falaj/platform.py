"""Commands of the platform of one state folder, and of what is deployed to it."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from falaj.context import EXIT_FAILED, Context, DryRun, Here, Shown
from infra.orchestration.client import platform_environment
from infra.platform.config import CONFIG_VARIABLE, kept_options, read_config
from infra.platform.files import PlatformFiles
from tasks.kernel.errors import ConfigurationError, NotRunningError
from tasks.kernel.extras import require_extras


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
) -> Shown:
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

    Examples:
        falaj up
        falaj up --port 4300 --no-serving
    """
    from infra.platform.health import read_status
    from infra.platform.lifecycle import bring_up

    require_extras("platform", *([] if serving is False else ["serve"]))
    files = platform_files(context)
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
    return Shown(read_status(files) if context.as_json else None)


def down(
    *, now: bool = False, limit: float | None = None, dry_run: DryRun = False, context: Here
) -> Shown:
    """Let runs end, then stop the platform.

    Args:
        now: Wait for no run; mark what is cut off.
        limit: Seconds to wait for runs.

    Examples:
        falaj down --dry-run
        falaj down --limit 60
    """
    from infra.platform.health import read_status
    from infra.platform.lifecycle import bring_down, running_here

    files = platform_files(context)
    if dry_run:
        services, runs = running_here(files)
        lines = [
            f"would end     {', '.join(services) or 'nothing: no platform runs'}",
            *(f"{'would cut off' if now else 'waits for':<14}{run}" for run in runs),
            "Nothing was changed",
        ]
        return Shown({"services": services, "runs": runs}, lines)
    try:
        bring_down(files, at_once=now, limit_s=limit)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(str(exc) or "interrupted; the platform runs on as before") from exc
    return Shown(read_status(files) if context.as_json else None)


def doctor(*, context: Here) -> Shown:
    """Find what is wrong with the platform, and what to do; exit code 1 where something is.

    Examples:
        falaj doctor
    """
    from infra.platform.health import examine, exit_code, report

    findings = examine(platform_files(context), os.environ)
    return Shown(findings, report(findings).splitlines(), exit_code(findings))


def logs(service: str = "supervisor", /, *, lines: int = 50, context: Here) -> Shown:
    """Show the last lines of a service's log.

    Args:
        service: As `status` names it.
        lines: How many.

    Examples:
        falaj logs prefect --lines 100
    """
    from infra.platform.lifecycle import log_lines

    found = log_lines(platform_files(context), service, lines)
    return Shown({"service": service, "lines": found}, found)


def supervise(*, context: Here) -> None:
    """Be the supervisor, in the foreground (for an init system).

    Examples:
        falaj supervise
    """
    from infra.platform.services import supervise as run_supervisor

    run_supervisor(platform_files(context))


def deploy(
    *,
    check: Annotated[bool, Parameter(name=["--check", "--dry-run"])] = False,
    pools: Literal["process", "kubernetes"] = "process",
    wait: float = 0,
    file: Path | None = None,
    resume: bool = False,
    prune: bool = False,
    context: Here,
) -> Shown:
    """Write what differs from the files, leave equal things alone, and read all back.

    The use cases are those of --project, which may be repeated as PATH[=PATH_ON_WORKERS]; the first
    has plain deployment names. Without it: FALAJ_FEATURE_REPOS, separated by colons, or the one of
    FALAJ_FEATURE_REPO. Exit code 1 where something differs.

    Args:
        check: Only compare; changes nothing.
        pools: Kind of work pools.
        wait: Seconds, for a server that is starting; the files are read meanwhile.
        file: Instead of prefect.yaml.
        resume: Switch on again what people have paused.
        prune: Remove deployments and automations of ours that the files no longer have.

    Examples:
        falaj deploy --dry-run
        falaj deploy --project feature_repo/flights --project feature_repo/traffic
    """
    if not os.environ.get("PREFECT_API_URL"):  # Prefect reads it when it is imported
        environment = platform_environment(context.home)
        if environment is None:
            raise NotRunningError(
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
    lines = [f"{name:<11}{line}" for name, found in columns.items() for line in found]
    lines.append(
        f"{len(outcome.equal)} as the files say, {len(outcome.written)} written, "
        f"{len(outcome.differences)} differences"
    )
    facts = {**columns, "equal": outcome.equal}
    return Shown(facts, lines, EXIT_FAILED if outcome.differences else 0)


serve = App(name="serve")
Port = Annotated[int | None, Parameter(help="0 takes a free one (default: of serving.yaml).")]


@serve.default
def _serve(
    *,
    host: str | None = None,
    http_port: Port = None,
    grpc_port: Port = None,
    admin_port: Port = None,
    no_grpc: bool = False,
    context: Here,
) -> None:
    """Serve the promoted models until SIGTERM; the addresses are printed.

    Args:
        host: Address that HTTP and gRPC listen on (default: of serving.yaml).
        no_grpc: HTTP only.

    Examples:
        falaj serve
        falaj serve --http-port 8100 --no-grpc
    """
    require_extras("serve")
    options: dict[str, object] = {
        "--host": host,
        "--http-port": http_port,
        "--grpc-port": grpc_port,
        "--admin-port": admin_port,
    }
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    _become_server(context, "serve", *words, *(["--no-grpc"] if no_grpc else []))


@serve.command(name="status")
def _serve_status(*, context: Here) -> None:
    """Show what serves from the state folder; exit code 3 where nothing does.

    Examples:
        falaj serve status
    """
    _become_server(context, "status")


@serve.command(name="stop")
def _serve_stop(*, timeout_s: float = 60, context: Here) -> None:
    """End the server, its requests answered.

    Args:
        timeout_s: How long to wait for the end.

    Examples:
        falaj serve stop --timeout-s 10
    """
    _become_server(context, "stop", f"--timeout-s={timeout_s:g}")


@serve.command(name="settings")
def _serve_settings(*, context: Here) -> None:
    """Print the JSON schemas of serving.yaml and of the security file.

    Examples:
        falaj serve settings
    """
    _become_server(context, "settings")


def _become_server(context: Context, *words: str) -> None:
    """Go on as `python -m serving`, the process that the platform starts too."""
    os.environ["FALAJ_HOME"] = str(context.home)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "serving", *words])


def platform_files(context: Context) -> PlatformFiles:
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
