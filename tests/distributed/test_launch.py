"""Ranks forked from a prepared process are like started ones, and nothing of either outlives."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch.fork_server import ForkServer
from tasks.training.launch.guard import descendants
from tests.support.host.processes import wait_until
from tests.support.ranks.rank_programs import GONE_WITHIN_S, RANK_MODULE, group, run_to_the_end

pytestmark = pytest.mark.slow

SECRET = "marker-of-a-secret-8e1f02"
READY_WITHIN_S = 120


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


def descriptions(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """What ranks said of themselves, without what differs between any two runs."""
    found = []
    for rank in range(num_ranks):
        said = json.loads((folder / f"rank-is-{rank}").read_text())
        for name in ("HOROVOD_GLOO_RENDEZVOUS_PORT", "TORCH_STORE_FILE"):
            said["environment"].pop(name)
        said["environment"].pop("LC_CTYPE", None)  # Python sets it where there is no locale
        found.append(json.loads(json.dumps(said).replace(str(folder), "FOLDER")))
    return found


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    with ForkServer([RANK_MODULE], tmp_path) as prepared:
        yield prepared


@pytest.fixture(scope="module")
def shared_fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer([RANK_MODULE], tmp_path_factory.mktemp("fork_server")) as prepared:
        assert prepared.wait_until_ready(READY_WITHIN_S)
        yield prepared


def test_a_forked_rank_finds_what_a_started_one_finds(
    tmp_path: Path, shared_fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_DATABASE_PASSWORD", SECRET)
    with group(tmp_path / "started", None, "end", "end", threads=2) as ranks:
        run_to_the_end(ranks)
        assert (ranks.how_started, ranks.exit_codes) == ("started", {0: 0, 1: 0})
    with group(tmp_path / "forked", shared_fork_server, "end", "end", threads=2) as ranks:
        lines = run_to_the_end(ranks)
        assert (ranks.how_started, ranks.exit_codes) == ("forked", {0: 0, 1: 0})
    assert sorted(lines) == [(0, "about to end"), (1, "about to end")]
    forked = descriptions(tmp_path / "forked", 2)
    pipes = [said.pop("descriptors")[1:] for said in forked]
    assert all(text.startswith("pipe:") for pipe in pipes for _, text in pipe)
    started = descriptions(tmp_path / "started", 2)
    for said in started:
        assert said.pop("descriptors")[0] == [0, "/dev/null"]
    assert forked == started
    assert forked[0]["threads"] == 2
    assert forked[0]["sum"] == [3.0]
    assert forked[0]["blocked"] == []
    assert SECRET not in json.dumps(forked + started)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("raise", 1, "ValueError: on purpose"),
        ("exit 7", 7, "about to exit 7"),
        ("leave a child", 0, "about to leave a child"),
    ],
)
def test_a_forked_rank_ends_like_a_program(
    tmp_path: Path, shared_fork_server: ForkServer, way: str, code: int, said: str
) -> None:
    before = descendants(os.getpid())
    with group(tmp_path / "run", shared_fork_server, way) as ranks:
        lines = run_to_the_end(ranks)
        assert (0, said) in lines
        assert ranks.exit_codes == {0: code}
    wait_until(lambda: set(descendants(os.getpid())) <= set(before), "nothing else is left")


@pytest.mark.slow
def test_a_killed_rank_is_told_from_a_stopped_one_and_the_others_go_with_the_group(
    tmp_path: Path, shared_fork_server: ForkServer
) -> None:
    with group(tmp_path / "run", shared_fork_server, "sleep", "sleep") as ranks:
        first, second = pids(tmp_path / "run", 2)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: ranks.exit_codes == {1: 128 + signal.SIGKILL}, "rank 1 is gone")
        assert is_alive(first)
    assert all_gone(first, second)
    assert ranks.stopped == {0}
    assert shared_fork_server.is_alive


@pytest.mark.slow
def test_a_rank_goes_with_its_guard(tmp_path: Path, shared_fork_server: ForkServer) -> None:
    with group(tmp_path / "run", shared_fork_server, "sleep") as ranks:
        (rank,) = pids(tmp_path / "run", 1)
        psutil.Process(rank).parent().kill()
        wait_until(lambda: ranks.exit_codes == {0: 128 + signal.SIGKILL}, "the end is known")
        assert all_gone(rank)


@pytest.mark.slow
def test_ps_names_ranks_and_shows_no_secret(
    tmp_path: Path, shared_fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_DATABASE_PASSWORD", SECRET)
    with group(tmp_path / "run", shared_fork_server, "sleep", "sleep"):
        ranks = [psutil.Process(pid) for pid in pids(tmp_path / "run", 2)]
        assert [rank.name() for rank in ranks] == ["falaj-rank-0", "falaj-rank-1"]
        for pid in descendants(os.getpid()):
            for file in ("cmdline", "environ"):
                assert SECRET.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()


@pytest.mark.slow
def test_groups_leave_no_descriptor_open_in_the_driver(
    tmp_path: Path, shared_fork_server: ForkServer
) -> None:
    before = os.listdir("/proc/self/fd")
    for number in range(2):
        with group(tmp_path / f"run-{number}", shared_fork_server, "end") as ranks:
            run_to_the_end(ranks)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
def test_ranks_can_be_ordered_before_everything_is_imported(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    assert not fork_server.is_ready
    with group(tmp_path / "run", fork_server, "end") as ranks:
        assert run_to_the_end(ranks) == [(0, "about to end")]
        assert (ranks.how_started, ranks.exit_codes) == ("forked", {0: 0})


@pytest.mark.slow
def test_kill_9_of_the_prepared_process_ends_its_ranks_and_the_next_are_started_anew(
    tmp_path: Path, fork_server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    with group(tmp_path / "run", fork_server, "sleep", "sleep") as ranks:
        killed = pids(tmp_path / "run", 2)
        psutil.Process(killed[0]).parent().parent().kill()
        wait_until(
            lambda: set(ranks.exit_codes.values()) == {128 + signal.SIGKILL}, "the end is known"
        )
    assert all_gone(*killed)
    with (
        caplog.at_level(logging.WARNING),
        group(tmp_path / "again", fork_server, "end") as ranks,
    ):
        run_to_the_end(ranks)
        assert (ranks.how_started, ranks.exit_codes) == ("started", {0: 0})
    assert "there is no living process prepared for" in caplog.text


@pytest.mark.slow
def test_a_module_that_starts_a_thread_is_not_forked_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        ForkServer([RANK_MODULE, "tests.support.ranks.threaded"], tmp_path) as fork_server,
        group(tmp_path / "run", fork_server, "end") as ranks,
    ):
        assert run_to_the_end(ranks) == []
        assert ranks.exit_codes == {0: 1}
        assert not fork_server.wait_until_ready(1)
    assert (
        "importing tests.support.ranks.described_rank, tests.support.ranks.threaded has started "
        in (capfd.readouterr().err)
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver", "guard"])
def test_kill_9_of_the_driver_or_of_the_first_guard_leaves_no_process(
    tmp_path: Path, victim: str
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ranks.rank_programs", str(tmp_path)], cwd=PROJECT_ROOT
    )
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
