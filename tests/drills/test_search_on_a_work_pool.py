"""A search whose trials run on a work pool: a real server, a real process worker, a lost trial."""

import os
import signal
from pathlib import Path
from threading import Thread

import psutil
import pytest
from prefect.client.orchestration import get_client

from flows.training import trial_flow
from tasks.kernel.settings import Settings
from tests.support.data.builders import dataset, frame
from tests.support.host.processes import pids_whose_command_holds, wait_until
from tests.support.platform.deployed import deploy
from tests.support.services.prefect_platform import PrefectApi
from tests.support.suite.promises import Promise, proves
from tests.support.training.searches import NUM_ROWS, search_under_test, trained_once, use_case

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

POOL = "trials"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    return Settings.from_environment()


def engines(settings: Settings) -> list[int]:
    """Processes that run trials of this search: other tests on this machine have engines too."""
    home = str(settings.home)
    return [
        pid
        for pid in pids_whose_command_holds("prefect.engine")
        if psutil.Process(pid).environ().get("FALAJ_HOME") == home
    ]


@proves(Promise.INTERRUPT, "the lost trial is taken up")
def test_trials_run_on_the_pool_and_a_lost_one_is_taken_up(
    prefect_api: PrefectApi, on_prefect: None, settings: Settings
) -> None:
    with get_client(sync_client=True) as client:
        deploy(client, trial_flow, "pool", POOL)
    data = dataset(settings.store, frame(NUM_ROWS))
    config = use_case(work_pool="pool", num_trials=3, parallel_trials=2, pruner="none")
    killed: list[int] = []

    def kill_one() -> None:
        """End the engine that runs a trial, as a host that goes away would."""
        wait_until(lambda: engines(settings), "an engine", 300)
        killed.append(engines(settings)[0])
        os.kill(killed[0], signal.SIGKILL)

    with prefect_api.worker(POOL):
        killer = Thread(target=kill_one, daemon=True)
        killer.start()
        study = search_under_test(data, config)
        killer.join(10)

    assert killed
    assert [trial.state for trial in study.trials] == ["complete"] * 3
    assert max(trial.attempts for trial in study.trials) == 2
    assert trained_once(settings) == 3
    wait_until(
        lambda: not pids_whose_command_holds(str(settings.home / "training")), "no rank is left", 60
    )
