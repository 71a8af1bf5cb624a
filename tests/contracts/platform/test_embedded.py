"""The embedded Prefect server: it serves one run, and never outlives it."""

import os
import subprocess
from pathlib import Path

import pytest

from infra.orchestration.embedded import disk_with_space, only_run
from tasks.kernel import files
from tasks.kernel.errors import ConfigurationError, StorageError, TransientError, WindowError
from tests.support.host.processes import processes_of, python, run_python, wait_until

SECRET = "marker-of-a-secret-90ce"
RUN_A_FLOW = """
import os, sys, time
from pathlib import Path
from infra.orchestration.embedded import client_environment, free_port, prefect_server
from infra.orchestration.embedded import wait_for_server
home, port = Path(sys.argv[1]), free_port()
with prefect_server(home, port) as server:
    os.environ.update(client_environment(home, port))
    from prefect import flow, task
    from tasks.control.routing.task import keep_results
    wait_for_server(server, home, port)
    keep_results()

    @task(persist_result=True, result_serializer="json")
    def double(number: int) -> int:
        return 2 * number

    @flow
    def doubling() -> int:
        return double(21)

    print("result", doubling(), flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_flow_runs_on_it_and_an_ended_or_killed_run_leaves_no_process(
    tmp_path: Path, is_killed: bool
) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    options = {
        "env": {**inherited, "FALAJ_DATABASE_PASSWORD": SECRET},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    line = ("-c", RUN_A_FLOW, str(tmp_path), "120" if is_killed else "3")
    with python(*line, **options) as run:
        assert run.stdout.readline().startswith("result 42")
        servers = [p for p in processes_of(tmp_path) if p.pid != run.pid]
        assert servers
        for server in servers:
            assert SECRET not in server.environ().values()
            # Ctrl-C reaches a terminal's whole group: the flow needs its server to end in order.
            assert os.getpgid(server.pid) != os.getpgid(run.pid)
        if is_killed:
            run.kill()
        run.wait(200)
    wait_until(lambda: not processes_of(tmp_path), "nothing is left", 10)


def test_a_state_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with only_run(tmp_path):
        with (
            pytest.raises(ConfigurationError, match=f"process {os.getpid()} is running"),
            only_run(tmp_path),
        ):
            pass
    with only_run(tmp_path):
        assert (tmp_path / "run.lock").read_text() == str(os.getpid())


def test_a_disk_without_space_is_what_a_run_is_told_of_whatever_failed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_into(failure: Exception, least_free_bytes: int) -> None:
        with monkeypatch.context() as patch, disk_with_space(tmp_path / "home"):
            patch.setattr(files, "LEAST_FREE_BYTES", least_free_bytes)  # what it has by now
            raise failure

    with pytest.raises(TransientError, match="no answer"):
        run_into(TransientError("no answer"), 0)
    with pytest.raises(StorageError, match=r"Free some space.* The run met TransientError: no ans"):
        run_into(TransientError("no answer"), 1 << 60)
    with pytest.raises(WindowError, match="is reversed"):  # this has nothing to do with it
        run_into(WindowError("is reversed"), 1 << 60)
    monkeypatch.setattr(files, "LEAST_FREE_BYTES", 1 << 60)
    with pytest.raises(StorageError, match="nothing was begun"):
        run_into(AssertionError("it was begun"), 0)
    assert not (tmp_path / "home").exists()


LATE = """
import atexit, runpy, sys
atexit.register(lambda: sys.stderr.write("said late"))  # runs after what the program registers
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("falaj", "decisions"), ("serving", "settings")], ids=["falaj", "serving"]
)
def test_what_a_program_says_at_its_very_end_is_seen(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    program, command = words
    done = run_python("-c", LATE, program, "--home", str(tmp_path / "home"), command)
    assert (done.returncode, done.stderr) == (0, "said late")
