"""`up` and `down`.

`up` starts the supervisor, detached, and shows how its services become ready. `down` lets runs end,
then ends the platform; or it ends it at once and lists the runs that this cut off.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from infra.orchestration.client import is_running, read_password
from infra.platform.api import NotFoundError, PrefectApi, runs_of
from infra.platform.config import (
    CONFIG_VARIABLE,
    COORDINATOR,
    PlatformConfig,
    require_free_ports,
    stored_config,
)
from infra.platform.files import (
    PlatformFiles,
    PlatformState,
    ensure_password,
    now,
    other_code,
    paused_pools,
    read_endpoint,
    read_state,
    supervisor_pid,
)
from infra.platform.health import check_copy, check_pins
from infra.platform.openbao import OpenBaoFiles
from infra.platform.services import DEPLOYING, STORES, WORKER, resume_pools, store_url
from infra.platform.supervisor import GRACE_S, rotate, tail
from tasks.kernel.errors import ConfigurationError, FalajError, TransientError
from tasks.kernel.files import locked, make_folder, private_folder, require_space, write_atomically
from tasks.kernel.process import attempts
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import PROJECT_ROOT

START_LIMIT_S = 600.0
START_POLL_S = 0.2
EXIT_S = 10.0
"""Python takes a moment from the end of a supervisor's work to the end of its process."""
REPORT_EVERY_S = 5.0
STOP_LIMIT_S = 3 * GRACE_S + 60.0
"""Three groups of processes with their grace, and a margin."""
LINES_SHOWN = 12
RESTARTS_TOLERATED = 4
SUPERVISOR = "supervisor"


class NotUpError(FalajError):
    """The platform did not come up; the message names what did not, and where to look."""


class NotDownError(FalajError):
    """The platform still runs; the message gives the reason."""


def bring_up(files: PlatformFiles, config: PlatformConfig, environment: dict[str, str]) -> None:
    """Start the platform and wait until all of it is ready; harmless where it runs.

    One that runs other code than this lets its runs end, goes down and is started with this.

    Raises:
        ConfigurationError: it runs with another configuration, or the configuration is wrong.
        NotUpError: a service did not become ready; the supervisor keeps trying.
        StorageError: there is too little space on its disk.
    """
    private_folder(files.folder)
    with locked(files.start_lock):  # two at once would each make a password, and one be wrong
        if other := other_code(files):
            _require_same(files, config)
            print(f"The platform runs {other}; this is {code_commit()}. It is started again.")
            bring_down(files, at_once=False)
        paused = ", ".join(paused_pools(files))
        process = None if is_running(files.home) else _begin(files, config, environment)
    if process is None:
        _require_same(files, config)
        print("The platform is running already; nothing was started.")
    _wait_until_up(files, process)
    if paused and (endpoint := read_endpoint(files)):
        resume_pools(PrefectApi(endpoint.api_url, read_password(files.folder)), files)
        print(f"Resumed the pools that going down had paused: {paused}")
    _show_addresses(files, config)


def _begin(
    files: PlatformFiles, config: PlatformConfig, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the supervisor, and wait until everybody can see that it lives."""
    wrong = [finding for finding in check_pins() if finding.level != "ok"]
    if wrong:
        raise ConfigurationError(f"{'; '.join(f.seen for f in wrong)}. Do: {wrong[0].advice}")
    require_space(files.home)
    require_free_ports(config)
    for variable in STORES:
        store_url(variable, config, environment)
    made = ensure_password(files)[1] if config.password else False
    write_atomically(files.config, config.model_dump_json(indent=1))
    files.state.unlink(missing_ok=True)
    log = files.log(SUPERVISOR)
    make_folder(log.parent)
    rotate(log)
    # The stored configuration is that of the file with the command's options over it.
    inherited = {name: v for name, v in environment.items() if name != CONFIG_VARIABLE}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "falaj", "--home", str(files.home), "supervise"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**inherited, "FALAJ_HOME": str(files.home)},
            cwd=PROJECT_ROOT,
            start_new_session=True,  # the terminal's Ctrl-C and its end are not for it
        )
    if made:
        print(f"\n  Login  {read_password(files.folder)}")
        print("  Prefect's login page has one field: paste this whole line. MLflow asks for user")
        print("  and password apart: what is before the colon, and what is after it.")
        print(f"  It is shown this once, and kept in {files.secret}\n")
    for finding in check_copy(files.home):
        print(f"{finding.seen}. {finding.advice}".rstrip())
    print(f"Starting the platform ({config.profile}) on {files.home}", flush=True)
    while process.poll() is None and not is_running(files.home):
        time.sleep(START_POLL_S)
    return process


def _require_same(files: PlatformFiles, config: PlatformConfig) -> None:
    wanted = config.model_dump()
    different = [
        f"{name}={value} (wanted: {wanted[name]})"
        for name, value in stored_config(files).model_dump().items()
        if value != wanted[name]
    ]
    if different:
        raise ConfigurationError(
            f"the platform on {files.home} runs with {', '.join(different)}. Nothing was changed; "
            "to run it otherwise: make down, then make up again"
        )


def _wait_until_up(files: PlatformFiles, supervisor: subprocess.Popen[bytes] | None) -> None:
    """Print a line for each service that becomes ready, until all are.

    Args:
        files: the platform's.
        supervisor: None where another command has started it.

    Raises:
        NotUpError: one is not, and why.
    """
    started, deploying = time.monotonic(), files.log(DEPLOYING)
    began = deploying.stat().st_size if deploying.exists() else 0
    shown: set[str] = set()
    while True:
        state = read_state(files)
        ended = supervisor.poll() is not None if supervisor else not is_running(files.home)
        seconds = time.monotonic() - started
        for service in state.services if state and supervisor else ():
            if service.name not in shown and service.condition in ("up", "done", "failed"):
                shown.add(service.name)
                line = f"  {service.name:<22}{service.condition:<8}after {seconds:.0f} s"
                print(line, flush=True)
                if service.name == DEPLOYING:
                    _show_deploying(tail(deploying, LINES_SHOWN, since=began))
        if ended:
            raise NotUpError(f"the supervisor has ended. {_end_of_log(files, SUPERVISOR)}")
        if state and (trouble := _trouble(files, state)):
            raise NotUpError(trouble)
        if state and state.phase == "up":
            return
        if seconds > START_LIMIT_S:
            raise NotUpError(
                f"not all is ready after {seconds:.0f} s; the supervisor keeps trying. make status "
                f"shows what is missing; the logs are in {files.logs}"
            )
        time.sleep(START_POLL_S)


def _show_deploying(lines: list[str]) -> None:
    """The log of deploying, except what it wrote, which is counted."""
    for line in [line for line in lines if not line.startswith("written ")] or lines[-1:]:
        print(textwrap.fill(line, 100, initial_indent=" " * 6, subsequent_indent=" " * 17))


def _trouble(files: PlatformFiles, state: PlatformState) -> str | None:
    """Why waiting for the platform is in vain; None where it is not."""
    if state.phase == "stopping":
        return "the platform is going down; when it is down: make up"
    for service in state.services:
        if service.condition == "failed" and state.phase == "up":
            return (
                f"{service.name} failed ({service.detail}). The servers and workers run. Correct "
                f"it, then: make down, make up. {_end_of_log(files, service.name)}"
            )
        if service.restarts >= RESTARTS_TOLERATED:
            return (
                f"{service.name} was started {service.restarts} times and ended each time "
                f"({service.detail}). The supervisor keeps trying: make status shows it, make "
                f"down ends it. {_end_of_log(files, service.name)}"
            )
    return None


def _end_of_log(files: PlatformFiles, name: str) -> str:
    lines = "\n".join(tail(files.log(name), LINES_SHOWN))
    return f"{files.log(name)} ends with:\n{lines}"


def _show_addresses(files: PlatformFiles, config: PlatformConfig) -> None:
    endpoint = read_endpoint(files)
    if endpoint is None:
        return
    print()
    kept = f"in {files.secret}; Prefect's login takes its whole line"
    shown = {
        "Prefect": endpoint.ui_url,
        "MLflow": endpoint.mlflow_url,
        "Serving": endpoint.serving_url,
        "Password": kept if config.password else "none: every user of this machine has access",
        "Logs": files.logs,
    }
    if (key := OpenBaoFiles(files.home).recovery).exists():
        shown["Recovery"] = f"key of OpenBao, shown nowhere: move {key} off this machine"
    if not [*files.home.glob("reports/latest"), *files.home.glob("use_cases/*/reports/latest")]:
        shown["Next"] = "nothing has been trained on this state folder yet. In Prefect's UI:"
        shown[""] = "Deployments, pipeline, Run, Quick run. Drift checks need its model"
    for name, value in shown.items():
        if value:
            print(f"{name:<10}{value}")
    if endpoint.profile == "embedded" and not config.host.startswith("127."):
        print(f"Listening on {config.host} without TLS: put a proxy with TLS before it")


def bring_down(files: PlatformFiles, *, at_once: bool, limit_s: float | None = None) -> None:
    """End the platform; harmless where none runs.

    Pools stop handing out runs, the coordinators' first: what they wait for must still be able to
    start. When no run is left, or the limit is reached, all processes end, and the runs that this
    cuts off are marked.

    Args:
        files: the platform's.
        at_once: wait for no run.
        limit_s: seconds to wait for runs; None: as configured.

    Raises:
        NotDownError: the server cannot report what runs, or processes do not end.
    """
    if not is_running(files.home):
        print(f"No platform runs on {files.home}.")
        return
    if not at_once:
        _drain(files, stored_config(files).drain_limit_s if limit_s is None else limit_s)
    _end(files)
    try:
        state = read_state(files)
    except ConfigurationError:
        state = None
    for run in state.cut_off if state else ():
        print(f"Cut off: run {run.name} ({run.id}) is {run.state.capitalize()} now")
    print(f"The platform on {files.home} is down since {now():%F %T} UTC; its state is kept.")


def running_here(files: PlatformFiles) -> tuple[list[str], list[str]]:
    """Services that run, and the runs of this machine's workers; nothing where no platform runs.

    Raises:
        TransientError: the server cannot report what runs.
    """
    endpoint, state = read_endpoint(files), read_state(files)
    if not is_running(files.home) or state is None:
        return [], []
    services = [service.name for service in state.services if service.condition == "up"]
    if endpoint is None:
        return services, []
    api = PrefectApi(endpoint.api_url, read_password(files.folder))
    return services, [str(run["name"]) for run in runs_of(api, _workers(files, state))]


def _workers(files: PlatformFiles, state: PlatformState) -> dict[str, str]:
    """Work pool to the name of its worker on this machine."""
    names = [service.name.partition(WORKER) for service in state.services]
    return {pool: files.worker_name(pool) for start, _, pool in names if pool and not start}


def _drain(files: PlatformFiles, limit_s: float) -> None:
    """Pause the pools and wait for their runs; interrupted, the platform stays as it was."""
    endpoint, state = read_endpoint(files), read_state(files)
    if endpoint is None or state is None:
        print("The server has not answered yet, so no run of its workers can be running.")
        return
    api = PrefectApi(endpoint.api_url, read_password(files.folder))
    workers = _workers(files, state)
    deadline = time.monotonic() + limit_s
    try:
        for group in ({COORDINATOR}, workers.keys() - {COORDINATOR}):
            _pause(api, files, group)
            _wait_for_runs(api, {p: n for p, n in workers.items() if p in group}, deadline)
    except KeyboardInterrupt:
        resume_pools(api, files)
        raise
    except TransientError as exc:
        with suppress(TransientError):  # `up` resumes what stays paused
            resume_pools(api, files)
        raise NotDownError(
            f"it cannot be seen which runs are running: {exc}. Nothing was ended. To end all at "
            "once: make down DOWN_ARGS=--now"
        ) from exc


def _pause(api: PrefectApi, files: PlatformFiles, pools: set[str]) -> None:
    handing_out = {str(pool["name"]) for pool in api.pools() if not pool["is_paused"]}
    for pool in sorted(handing_out & pools):
        write_atomically(files.paused, json.dumps(sorted([*paused_pools(files), pool])))
        with suppress(NotFoundError):  # deleted a moment ago
            api.pause_pool(pool, paused=True)


def _wait_for_runs(api: PrefectApi, workers: Mapping[str, str], deadline: float) -> None:
    reported = 0.0
    while runs := runs_of(api, workers):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            shown = ", ".join(f"{run['name']} ({run['state']['name']})" for run in runs[:5])
            print(f"Waiting up to {left:.0f} s more for {len(runs)} runs: {shown}", flush=True)
        time.sleep(1.0)


def _end(files: PlatformFiles) -> None:
    pid = supervisor_pid(files)
    if pid is None or not is_running(files.home):
        return
    os.kill(pid, signal.SIGTERM)
    try:
        if _gone(files):
            with suppress(psutil.Error):  # it let go of its lock; its process ends soon after
                psutil.Process(pid).wait(EXIT_S)
            return
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(
            "interrupted; the platform goes down all the same: make status shows when it is"
        ) from exc
    print("The supervisor has not ended and is killed; guards end the rest")
    os.kill(pid, signal.SIGKILL)
    if not _gone(files):
        raise NotDownError(f"process {pid} does not end even on SIGKILL; the kernel holds it")


def _gone(files: PlatformFiles) -> bool:
    return not all(is_running(files.home) for _ in attempts(STOP_LIMIT_S, 0.05))


def log_lines(files: PlatformFiles, name: str, lines: int) -> list[str]:
    """The last lines of a service's log.

    Raises:
        ConfigurationError: there is none of that name.
    """
    known = sorted(file.stem for file in files.logs.glob("*.log"))
    if name not in known:
        raise ConfigurationError(f"no log {name!r}; there are: {', '.join(known) or 'none yet'}")
    return tail(files.log(name), lines)
