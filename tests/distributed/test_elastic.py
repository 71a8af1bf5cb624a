import os
import signal
import subprocess
from pathlib import Path

import pytest

from infra.bench.elastic.runs import LOCAL, ElasticRun, pid_of_rank, run_here
from infra.bench.elastic.worker import TinyJob
from tasks.kernel.errors import TrainingError
from tasks.training.elastic.driver import ElasticDriver
from tests.support.host.processes import pids_whose_command_holds, python, wait_until
from tests.support.ranks.elastic import lost_steps
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.slow
TWO = LOCAL.model_copy(update={"slots_per_host": 2})


def test_a_killed_rank_costs_no_committed_step_and_its_slot_is_used_again(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path / "run")
    killed: list[str] = []

    def kill_rank_0(driver: ElasticDriver) -> None:
        if not killed and run.has_done(5, size=3):
            killed.append(next(m.place for m in driver.members if m.rank == 0))
            os.kill(pid_of_rank(driver, 0), signal.SIGKILL)
        groups = driver.report.groups
        lost = [g.number for g in groups if killed and g.reason == f"{killed[0]} was lost"]
        if lost and groups[-1].number > lost[0] and groups[-1].size == 3:
            run.go()

    # A survivor that waits for another survivor would notice at Gloo's time-out alone, when the
    # slot has long its new rank and a group of two is never formed.
    config = LOCAL.model_copy(update={"gloo_timeout_s": 60})
    report = run_here(run, TinyJob(config=config, num_steps=150, patient=True), kill_rank_0)
    run.check_result()
    lost = [event for event in report.events if event.kind == "lost"]
    assert [event.place for event in lost] == killed
    assert "was killed (signal 9; out of memory?)" in lost[0].text
    without = next(g for g in report.groups if g.reason == f"{killed[0]} was lost")
    assert without.size == 2
    after = next(g for g in report.groups if g.number > without.number)
    assert after.size == 3
    assert killed[0] in after.reason
    assert killed[0] in report.groups[-1].places
    assert not pids_whose_command_holds(str(tmp_path))


@proves(Promise.EVICTION, "the evicted rank commits and leaves; training goes on")
def test_a_rank_that_is_asked_to_end_commits_and_leaves_and_nobody_is_blamed(
    tmp_path: Path,
) -> None:
    run = ElasticRun(tmp_path / "run")
    asked: list[int] = []

    def ask_rank_1(driver: ElasticDriver) -> None:
        if not asked and run.has_done(5, size=2):
            asked.append(pid_of_rank(driver, 1))
            os.kill(asked[0], signal.SIGTERM)

    report = run_here(run, TinyJob(config=TWO, num_steps=60), ask_rank_1)
    run.check_result()
    assert [event.kind for event in report.events if event.kind in ("lost", "left")] == ["left"]
    assert report.groups[-1].size == 1
    assert lost_steps(run) == 0
    assert (run.path / "checkpoint.pt").exists()


def test_a_rank_that_is_lost_while_the_others_meet_it_is_all_that_is_lost(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path / "run")
    report = run_here(run, TinyJob(config=LOCAL, num_steps=20, dies_while_joining=True))
    run.check_result()
    assert len([event for event in report.events if event.kind == "lost"]) == 1
    assert len(report.groups) > 1


def test_an_error_of_user_code_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path / "run")
    with pytest.raises(TrainingError) as caught:
        run_here(run, TinyJob(config=TWO, failing_step=17))
    assert str(caught.value) == "localhost rank 0: ValueError: column 'age' has NaN in row 17"
    assert "in _train_step" in caught.value.__notes__[0]
    assert max(step.number for step in run.steps) == 17
    assert not pids_whose_command_holds(str(tmp_path))


def test_ranks_that_disagree_are_not_tried_for_ever(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path / "run")
    with pytest.raises(TrainingError, match="groups in a row broke although no rank was lost"):
        run_here(run, TinyJob(config=TWO, mismatch=True))


def test_kill_9_of_the_driver_leaves_no_rank(tmp_path: Path) -> None:
    run = ElasticRun(tmp_path / "run")
    run.prepare(TinyJob(config=LOCAL, num_steps=100_000))
    line = ("-m", "infra.bench.elastic.runs", str(run.path))
    with python(*line, stderr=subprocess.DEVNULL) as driver:
        wait_until(lambda: run.has_done(3), "ranks train", 120)
        driver.kill()
    wait_until(lambda: not pids_whose_command_holds(str(tmp_path)), "no process is left")
