"""Forked ranks are like programs of their own, and nothing outlives a killed run."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tasks.kernel.guard import descendants
from tests.support.host.processes import python, wait_until
from tests.support.ranks.rank_programs import GONE_WITHIN_S, group, run_to_the_end

pytestmark = pytest.mark.slow

SECRET = "marker-of-a-secret-8e1f02"
READY_WITHIN_S = 120
KILLED = 128 + signal.SIGKILL


def pids(folder: Path, num_ranks: int) -> list[int]:
    """Process ids of ranks, once all of them have said who they are."""
    files = [folder / f"pid-{rank}" for rank in range(num_ranks)]
    wait_until(lambda: all(file.exists() for file in files), "ranks are up", READY_WITHIN_S)
    return [int(file.read_text()) for file in files]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(*some: int) -> bool:
    wait_until(lambda: not any(map(is_alive, some)), "all are gone", GONE_WITHIN_S)
    return True


def test_ranks_have_what_they_need_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_DATABASE_PASSWORD", SECRET)
    before = os.listdir("/proc/self/fd")
    with group(tmp_path / "run", "end", "end", threads=2) as ranks:
        assert sorted(run_to_the_end(ranks)) == [(0, "about to end"), (1, "about to end")]
        assert ranks.exit_codes == {0: 0, 1: 0}
    assert len(os.listdir("/proc/self/fd")) == len(before)
    folder = str(tmp_path / "run")
    for rank in range(2):
        text = (tmp_path / "run" / f"rank-is-{rank}").read_text()
        assert SECRET not in text
        said = json.loads(text)
        (_, stdin), *outputs = said["descriptors"]
        assert stdin == "/dev/null"
        assert all(name.startswith("pipe:") for _, name in outputs)
        assert (said["folder"], said["arguments"]) == (folder, [folder])
        assert (said["threads"], said["sum"], said["blocked"]) == (2, [3.0], [])
        assert said["leads_its_session"]
        assert said["environment"]["HOROVOD_RANK"] == str(rank)


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("raise", 1, "ValueError: on purpose"),
        ("exit 7", 7, "about to exit 7"),
        ("leave a child", 0, "about to leave a child"),
    ],
)
def test_a_rank_ends_like_a_program(tmp_path: Path, way: str, code: int, said: str) -> None:
    before = descendants(os.getpid())
    with group(tmp_path / "run", way) as ranks:
        assert (0, said) in run_to_the_end(ranks)
        assert ranks.exit_codes == {0: code}
    wait_until(lambda: set(descendants(os.getpid())) <= set(before), "nothing else is left")


def test_a_killed_rank_is_told_from_a_stopped_one_and_the_others_go_with_the_group(
    tmp_path: Path,
) -> None:
    with group(tmp_path / "run", "sleep", "sleep", "sleep") as ranks:
        found = pids(tmp_path / "run", 3)
        names = [psutil.Process(pid).name() for pid in found]
        assert names == ["falaj-rank-0", "falaj-rank-1", "falaj-rank-2"]
        os.kill(found[1], signal.SIGKILL)
        psutil.Process(found[2]).parent().kill()
        wait_until(lambda: ranks.exit_codes == dict.fromkeys((1, 2), KILLED), "both are gone")
        assert all_gone(found[1], found[2])
        assert is_alive(found[0])
    assert all_gone(*found)
    assert ranks.stopped == {0}


def test_kill_9_of_the_fork_server_ends_its_ranks(tmp_path: Path) -> None:
    with group(tmp_path / "run", "sleep", "sleep") as ranks:
        killed = pids(tmp_path / "run", 2)
        psutil.Process(killed[0]).parent().parent().kill()
        wait_until(lambda: ranks.exit_codes == dict.fromkeys((0, 1), KILLED), "the end is known")
        assert all_gone(*killed)


@pytest.mark.parametrize("victim", ["driver", "guard"])
def test_kill_9_of_the_driver_or_of_the_first_guard_leaves_no_process(
    tmp_path: Path, victim: str
) -> None:
    driver = python("-m", "tests.support.ranks.rank_programs", str(tmp_path))
    try:
        ranks = pids(tmp_path / "run", 2)
        tree = descendants(driver.pid)
        assert set(ranks) <= set(tree)
        first_guard = psutil.Process(driver.pid).children()[0]
        os.kill(driver.pid if victim == "driver" else first_guard.pid, signal.SIGKILL)
        assert all_gone(*tree)
    finally:
        driver.kill()
        driver.wait()
