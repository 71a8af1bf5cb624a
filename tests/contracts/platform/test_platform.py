"""The real platform on a state folder of its own: up, killed in all its parts, up again, down.

The tests go on from each other, in this order: a start takes many seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.error import HTTPError

import psutil
import pytest

from infra.orchestration.client import is_running, platform_environment
from infra.platform.api import basic_auth
from infra.platform.files import supervisor_pid
from infra.platform.health import check_workers, read_status
from tests.support.host.processes import wait_until
from tests.support.platform.commands import LIMIT_S, UP, Platform
from tests.support.services.servers import free_port
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    platform = Platform(tmp_path_factory.mktemp("platform"), free_port())
    try:
        # Two at once: one starts it, the other waits for it.
        with platform.command("up", "--port", str(platform.port), *UP) as other:
            code, platform.said_at_first = platform.up()
            said, _ = other.communicate(timeout=LIMIT_S)
        platform.said_at_first += said
        assert code == other.returncode == 0, platform.said_at_first
        assert platform.said_at_first.count("Starting the platform") == 1
        yield platform
    finally:
        platform.run("down", "--now")
        for process in platform.processes():
            process.kill()


def test_up_starts_all_and_shows_the_password_once(platform: Platform) -> None:
    said = platform.said_at_first
    user, _, word = platform.password.partition(":")
    assert said.count(word) == 1
    assert user == "admin"
    assert stat.S_IMODE(platform.files.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(platform.files.folder.stat().st_mode) == 0o700
    for service in ("mlflow", "prefect", "deploying", "worker-coordinator", "worker-cpu"):
        assert re.search(rf"{service} +(up|done) +after \d+ s", said), said
    assert "deployed taking-time/cpu" in said
    assert f"http://127.0.0.1:{platform.port}" in said
    for process in platform.processes():
        assert word not in " ".join(process.cmdline())
    for log in platform.files.logs.iterdir():
        assert word not in log.read_text(errors="replace"), log


def test_up_twice_is_harmless_and_another_configuration_is_refused(platform: Platform) -> None:
    before = {process.pid for process in platform.processes()}
    code, said = platform.up()
    assert code == 0
    assert "running already; nothing was started" in said
    assert platform.password.partition(":")[2] not in said
    code, said = platform.run("up", "--port", str(free_port()), *UP)
    assert code == 2
    assert f"runs with port={platform.port} (wanted: " in said
    assert before <= {process.pid for process in platform.processes()}


def test_status_and_doctor_find_all_well(platform: Platform) -> None:
    platform.until_well()  # a busy SQLite may keep a new server waiting for a minute
    code, said = platform.run("status", "--json")
    assert code == 0
    status = json.loads(said)
    assert {pool["name"]: pool["online"] for pool in status["pools"]} == {
        "coordinator": 1,
        "cpu": 1,
    }
    code, said = platform.run("doctor")
    assert "PROBLEM" not in said
    assert "next run " in said
    assert "lease_storage.filesystem" in said
    assert code == 0


def test_both_servers_ask_for_the_password(platform: Platform) -> None:
    mlflow = f"{platform.endpoint.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
    report = platform.home / "reports" / "run-1" / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<h1>A report</h1>")
    (report.parents[1] / "latest").symlink_to("run-1")
    page = f"{platform.endpoint.mlflow_url}/reports/latest/report.html"
    for url in (f"{platform.endpoint.api_url}/admin/version", mlflow, page):
        for wrong in ({}, basic_auth("admin:wrong")):
            with pytest.raises(HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=wrong), timeout=60)
        right = urllib.request.Request(url, headers=basic_auth(platform.password))
        with urllib.request.urlopen(right, timeout=120) as reply:
            assert reply.status == 200
    for outside in ("../platform/secret", "%2e%2e/platform/secret", "none.html"):
        url = f"{platform.endpoint.mlflow_url}/reports/{outside}"
        with pytest.raises(HTTPError, match="404"):
            urllib.request.urlopen(
                urllib.request.Request(url, headers=basic_auth(platform.password)), timeout=60
            )
    with pytest.raises(HTTPError, match="403"):  # a page that points its own name here
        urllib.request.urlopen(
            urllib.request.Request(
                mlflow, headers={"Host": "evil.example", **basic_auth(platform.password)}
            ),
            timeout=60,
        )


def test_a_run_goes_through_and_what_it_needs_is_found_by_its_home(platform: Platform) -> None:
    environment = platform_environment(platform.home)
    assert environment
    assert environment["PREFECT_API_URL"] == platform.endpoint.api_url
    run = platform.start_run(0.5)
    wait_until(lambda: platform.state_of(run)["type"] == "COMPLETED", "run Completed", LIMIT_S)


@pytest.mark.slow
def test_runs_planned_by_schedule_are_forgotten_and_those_of_people_are_not(
    platform: Platform,
) -> None:
    [deployment] = platform.post("/deployments/filter", {})
    now, later = datetime.now(UTC), datetime.now(UTC) + timedelta(days=10)
    planned = platform.planned_run(now)
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": later.isoformat()}}
    own = platform.post(f"/deployments/{deployment['id']}/create_flow_run", {"state": state})
    assert platform.api.forget_planned(now.isoformat()) >= 1
    assert platform.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [planned]}}}) == []
    assert platform.state_of(own["id"])["type"] == "SCHEDULED"
    assert platform.planned_run(now) != planned  # the scheduler makes them again


def test_a_pool_without_a_worker_is_found(platform: Platform) -> None:
    platform.post("/work_pools/", {"name": "gpu", "type": "process"})
    code, said = platform.run("doctor")
    assert "WARNING  workers    pool 'gpu' has no worker online; its runs wait" in said
    assert code == 0
    levels = {f.level for f in check_workers(platform.api, ("gpu",)) if "'gpu'" in f.seen}
    assert levels == {"problem"}
    [finding] = [f for f in check_workers(platform.api, ("tpu",)) if "tpu" in f.seen]
    assert "there is no work pool 'tpu'" in finding.seen


def test_another_password_in_the_file_is_found(platform: Platform) -> None:
    right = platform.password
    platform.files.secret.write_text("admin:another\n")
    try:
        code, said = platform.run("doctor")
        assert code == 1
        assert "asks for another password than the one kept here" in said
        assert platform.run("status")[0] == 1
    finally:
        platform.files.secret.write_text(right + "\n")
    platform.until_well()


@pytest.mark.slow
def test_each_killed_server_comes_back_and_meanwhile_it_is_told(platform: Platform) -> None:
    for service in ("mlflow", "prefect"):
        supervisor = psutil.Process(supervisor_pid(platform.files))
        process = platform.guarded_process(service)
        process.kill()
        psutil.wait_procs([process], LIMIT_S)
        wait_until(
            lambda name=service: f"{name} is " in " ".join(read_status(platform.files).wrong),
            "told",
            LIMIT_S,
        )
        if service == "prefect":
            supervisor.suspend()  # so that it stays away until it was seen
            try:
                for other in platform.processes():
                    if "infra.platform.apps:create_prefect" in other.cmdline():
                        other.kill()
                code, said = platform.run("doctor")
                assert code == 1
                assert "does not answer" in said
                assert platform.run("status")[0] == 1
            finally:
                supervisor.resume()
        platform.until_well()
    restarts = {s.name: s.restarts for s in read_status(platform.files).services}
    assert restarts["mlflow"] >= 1
    assert restarts["prefect"] >= 1


@proves(Promise.KILLED_WORKER, "the run is Crashed, the worker is back")
def test_a_killed_worker_comes_back_and_its_run_is_not_running_for_ever(platform: Platform) -> None:
    run = platform.start_run(600)
    worker = platform.guarded_process("worker-cpu")
    engines = [p for p in worker.children(recursive=True) if "prefect.engine" in p.cmdline()]
    assert engines
    worker.kill()
    psutil.wait_procs([worker, *engines], LIMIT_S)
    assert not any(engine.is_running() for engine in engines)
    wait_until(lambda: platform.state_of(run)["type"] == "CRASHED", "run Crashed", LIMIT_S)
    platform.until_well()


@proves(Promise.KILLED_WORKER, "no process is left, the run is Crashed")
@pytest.mark.drill
def test_what_a_killed_guard_leaves_is_ended_and_marked(platform: Platform) -> None:
    run = platform.start_run(600)
    guard = platform.guarded_process("worker-cpu").parent()
    assert guard
    tree = guard.children(recursive=True)
    guard.kill()
    psutil.wait_procs(tree, LIMIT_S)
    assert not any(process.is_running() for process in tree)
    wait_until(lambda: platform.state_of(run)["type"] == "CRASHED", "run Crashed", LIMIT_S)
    platform.until_well()


def pools_paused(platform: Platform) -> dict[str, bool]:
    return {pool["name"]: pool["is_paused"] for pool in platform.api.pools()}


@pytest.mark.slow
def test_an_interrupted_down_leaves_the_platform_as_it_was(platform: Platform) -> None:
    platform.start_run(600)
    with platform.command("down") as down:
        assert down.stdout
        assert "Waiting up to" in down.stdout.readline()
        assert pools_paused(platform)["cpu"]
        down.send_signal(signal.SIGINT)
        said, _ = down.communicate(timeout=LIMIT_S)
    assert down.returncode == 130, said
    assert "the platform runs on as before" in said
    assert not any(pools_paused(platform).values())
    platform.until_well()


@pytest.mark.slow
@proves(Promise.NO_ORPHANS, "no process is left; up goes on")
def test_after_kill_9_nothing_is_left_and_up_goes_on_with_the_same_state(
    platform: Platform,
) -> None:
    done = platform.start_run(0.5)
    wait_until(lambda: platform.state_of(done)["type"] == "COMPLETED", "run Completed", LIMIT_S)
    cut = platform.start_run(600)
    with platform.command("down") as down:  # killed too: it leaves its pools paused
        assert down.stdout
        assert "Waiting up to" in down.stdout.readline()
        down.kill()
    assert any("make up resumes them" in said for said in read_status(platform.files).wrong)
    password, api_url = platform.password, platform.endpoint.api_url
    pid = supervisor_pid(platform.files)
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: platform.processes() == [], "nothing left", LIMIT_S)
    assert not is_running(platform.home)
    code, said = platform.run("status")
    assert code == 3
    assert "It was killed; make up starts it again" in said

    code, said = platform.up()
    assert code == 0, said
    assert password.partition(":")[2] not in said
    assert "Resumed the pools that going down had paused: coordinator, cpu" in said
    assert (platform.password, platform.endpoint.api_url) == (password, api_url)
    assert not any(pools_paused(platform).values())
    assert platform.state_of(cut)["type"] == "CRASHED"
    assert platform.state_of(done)["type"] == "COMPLETED"
    platform.until_well()


@pytest.mark.slow
def test_down_lets_runs_end_up_to_the_limit_and_marks_what_it_cuts_off(platform: Platform) -> None:
    long = platform.start_run(3600)
    short = platform.start_run(5)
    with platform.command("down", "--limit", "60") as down:
        said, _ = down.communicate(timeout=LIMIT_S)
    assert down.returncode == 0, said
    assert "Waiting up to" in said
    assert platform.stored_state_of(short) == "Completed"
    assert platform.stored_state_of(long) == "Crashed"
    assert f"({long}) is Crashed now" in said
    assert platform.processes() == []
    assert not platform.files.endpoint.exists()
    code, said = platform.run("status")
    assert (code, said.splitlines()[0]) == (3, f"No platform runs on {platform.home}.")
    assert platform.run("down") == (0, f"No platform runs on {platform.home}.\n")


@pytest.mark.slow
def test_a_start_without_up_hands_out_runs_again_that_going_down_had_held_back(
    platform: Platform,
) -> None:
    assert platform.files.paused.exists()  # the tests above have ended with a `down`
    supervisor = platform.command("supervise")  # as an init does
    try:
        wait_until(lambda: platform.files.endpoint.exists(), "the server answers", LIMIT_S)
        wait_until(lambda: not any(pools_paused(platform).values()), "pools resumed", LIMIT_S)
        assert not platform.files.paused.exists()
    finally:
        supervisor.terminate()
        supervisor.communicate(timeout=LIMIT_S)
