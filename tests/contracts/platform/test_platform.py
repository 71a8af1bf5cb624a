"""The real platform on a state folder of its own: up, killed in all its parts, up again, down.

The tests go on from each other, in this order: a start takes many seconds.
"""

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

from infra.orchestration.client import is_running
from infra.orchestration.embedded import free_port
from infra.platform.api import basic_auth
from infra.platform.files import platform_environment, supervisor_pid
from infra.platform.health import read_status
from tasks.control.recovery.task import is_engine
from tests.support.host.processes import wait_until
from tests.support.platform.commands import LIMIT_S, Platform
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with Platform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


def test_up_starts_all_and_shows_the_password_once(platform: Platform) -> None:
    said, word = platform.said, platform.password.partition(":")[2]
    assert said.count(word) == 1
    assert stat.S_IMODE(platform.files.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(platform.files.folder.stat().st_mode) == 0o700
    for service in ("mlflow", "prefect", "deploying", "worker-coordinator", "worker-cpu"):
        assert re.search(rf"{service} +(up|done) +after \d+ s", said), said
    assert f"http://127.0.0.1:{platform.port}" in said
    for process in platform.processes():
        assert word not in " ".join(process.cmdline())
    for log in platform.files.logs.iterdir():
        assert word not in log.read_text(errors="replace"), log

    before = {process.pid for process in platform.processes()}
    code, again = platform.up()
    assert code == 0
    assert word not in again
    code, other = platform.run("up", "--port", str(free_port()))
    assert code == 2
    assert f"runs with port={platform.port} (wanted: " in other
    assert before <= {process.pid for process in platform.processes()}


def test_status_and_doctor_find_all_well_and_what_is_not(platform: Platform) -> None:
    platform.until_well()  # a busy SQLite may keep a new server waiting for a minute
    code, said = platform.run("status", "--json")
    assert code == 0
    online = {pool["name"]: pool["online"] for pool in json.loads(said)["platform"]["pools"]}
    assert online == {"coordinator": 1, "cpu": 1}
    code, said = platform.run("doctor")
    assert "PROBLEM" not in said
    assert "next run " in said
    assert code == 0

    right = platform.password
    platform.files.secret.write_text("admin:another\n")
    try:
        code, said = platform.run("doctor")
        assert code == 1
        assert "asks for another password than the one kept here" in said
    finally:
        platform.files.secret.write_text(right + "\n")
    platform.until_well()


def test_both_servers_ask_for_the_password(platform: Platform) -> None:
    mlflow = f"{platform.endpoint.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
    right = basic_auth(platform.password)

    def status(url: str, headers: dict[str, str]) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120):
                return 200
        except HTTPError as exc:
            return exc.code

    for url in (f"{platform.endpoint.api_url}/admin/version", mlflow):
        answers = [status(url, each) for each in ({}, basic_auth("admin:wrong"), right)]
        assert answers == [401, 401, 200]
    # A page that points its own name here.
    assert status(mlflow, {"Host": "evil.example", **right}) == 403


def test_a_run_goes_through_and_those_planned_by_schedule_can_be_forgotten(
    platform: Platform,
) -> None:
    environment = platform_environment(platform.home)
    assert environment["PREFECT_API_URL"] == platform.endpoint.api_url
    platform.until_state(platform.start_run(0.5), "COMPLETED")

    [deployment] = platform.ask("POST", "/deployments/filter", {})
    now, later = datetime.now(UTC).isoformat(), datetime.now(UTC) + timedelta(days=10)
    wait_until(lambda: platform.api.planned_runs(now), "a planned run", LIMIT_S)
    planned = platform.api.planned_runs(now)[0]["id"]
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": later.isoformat()}}
    path = f"/deployments/{deployment['id']}/create_flow_run"
    own = platform.ask("POST", path, {"state": state})
    assert platform.api.forget_planned(now) >= 1
    assert platform.state_of(own["id"])["type"] == "SCHEDULED"  # a person planned it
    wait_until(lambda: platform.api.planned_runs(now), "the scheduler makes them again", LIMIT_S)
    assert planned not in [run["id"] for run in platform.api.planned_runs(now)]


def test_each_killed_server_comes_back_and_meanwhile_it_is_shown(platform: Platform) -> None:
    for name in ("mlflow", "prefect"):
        server = platform.service(name)
        server.kill()
        wait_until(
            lambda: f"{name} is " in " ".join(read_status(platform.files).wrong),  # noqa: B023
            "shown",
            LIMIT_S,
        )
        platform.until_well()
    restarts = {s.name: s.restarts for s in read_status(platform.files).services}
    assert min(restarts["mlflow"], restarts["prefect"]) >= 1


@proves(Promise.KILLED_WORKER, "no process is left, the run is Crashed, the worker is back")
@pytest.mark.parametrize("killed", ["worker", "guard"])
def test_a_killed_worker_comes_back_and_its_run_is_not_running_for_ever(
    platform: Platform, killed: str
) -> None:
    run = platform.start_run(600)
    worker = platform.service("worker-cpu")
    victim = worker if killed == "worker" else worker.parent()
    tree = [victim, *victim.children(recursive=True)]
    assert [is_engine(process.pid) for process in tree].count(True) == 1  # as recovery knows it
    victim.kill()
    psutil.wait_procs(tree, LIMIT_S)
    assert not any(process.is_running() for process in tree)
    platform.until_state(run, "CRASHED")
    platform.until_well()


def pools_paused(platform: Platform) -> set[str]:
    return {pool["name"] for pool in platform.api.pools() if pool["is_paused"]}


@proves(Promise.NO_ORPHANS, "no process is left; up resumes")
def test_after_kill_9_nothing_is_left_and_up_resumes_with_the_same_state(
    platform: Platform,
) -> None:
    done = platform.start_run(0.5)
    platform.until_state(done, "COMPLETED")
    cut = platform.start_run(600)
    for number in (signal.SIGINT, signal.SIGKILL):
        with platform.command("down") as down:
            assert "Waiting up to" in down.stdout.readline()
            assert "cpu" in pools_paused(platform)
            down.send_signal(number)
            down.communicate(timeout=LIMIT_S)
        # Interrupted, it leaves the platform as it was; killed, it leaves its pools paused.
        assert bool(pools_paused(platform)) == (number is signal.SIGKILL)
    assert any("make up resumes them" in said for said in read_status(platform.files).wrong)
    password, api_url = platform.password, platform.endpoint.api_url
    pid = supervisor_pid(platform.files)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: platform.processes() == [], "nothing left", LIMIT_S)
    assert not is_running(platform.home)
    code, said = platform.run("status")
    assert code == 3
    assert "It was killed; make up starts it again" in said

    code, said = platform.up()
    assert code == 0, said
    assert password.partition(":")[2] not in said
    assert (platform.password, platform.endpoint.api_url) == (password, api_url)
    assert not pools_paused(platform)
    assert platform.state_of(cut)["type"] == "CRASHED"
    assert platform.state_of(done)["type"] == "COMPLETED"
    platform.until_well()


def test_up_with_other_code_waits_for_runs_and_starts_the_platform_again(
    platform: Platform,
) -> None:
    before, run = supervisor_pid(platform.files), platform.start_run(5)
    platform.environment = {"FALAJ_CODE_COMMIT": "newer"}
    assert "and this is newer" in platform.run("doctor")[1]
    code, said = platform.up()
    assert code == 0, said
    assert "this is newer. It is started again" in said
    assert platform.state_of(run)["type"] == "COMPLETED"
    assert supervisor_pid(platform.files) != before
    assert platform.endpoint.code == "newer"
    platform.until_well()


def test_down_lets_runs_end_up_to_the_limit_and_marks_what_it_cuts_off(platform: Platform) -> None:
    long = platform.start_run(3600)
    short = platform.start_run(5)
    code, said = platform.run("down", "--limit", "60")
    assert code == 0, said
    assert platform.stored_state_of(short) == "Completed"
    assert platform.stored_state_of(long) == "Crashed"
    assert f"({long}) is Crashed now" in said
    assert platform.processes() == []
    assert not platform.files.endpoint.exists()
    assert platform.run("status")[0] == 3

    assert platform.files.paused.exists()
    supervisor = platform.command("supervise")  # as an init does
    try:
        wait_until(lambda: platform.files.endpoint.exists(), "the server answers", LIMIT_S)
        wait_until(lambda: not pools_paused(platform), "pools resumed", LIMIT_S)
        wait_until(lambda: not platform.files.paused.exists(), "noted", LIMIT_S)
    finally:
        supervisor.terminate()
        supervisor.communicate(timeout=LIMIT_S)
