"""The controller on real databases: many processes, storms of events, kills between the steps."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from falaj.__main__ import main
from infra.orchestration.embedded import free_port
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState
from tasks.kernel.errors import TransientError
from tasks.kernel.settings import Settings
from tests.support.control import builders
from tests.support.control.builders import FREE, MODEL, USE_CASE
from tests.support.control.controller import Controller
from tests.support.host.processes import python
from tests.support.suite.promises import Promise, proves

PROCESS_LIMIT_S = 240


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def process(url: str, runs: Path, *arguments: str) -> subprocess.Popen[str]:
    module = "tests.support.control.controller_process"
    return python("-m", module, url, str(runs), *arguments, stderr=subprocess.PIPE)


def end(*processes: subprocess.Popen[str]) -> list[int]:
    for one in processes:
        said = one.communicate(timeout=PROCESS_LIMIT_S)[1]
        assert one.returncode in (0, -signal.SIGKILL), said
    return [one.returncode for one in processes]


@pytest.mark.slow
@proves(Promise.TWO_PLATFORMS, "one claim, one run")
def test_a_storm_from_two_platforms_on_one_database_gives_one_run(url: str, runs: Path) -> None:
    result = Ledger(url).store_result(MODEL, USE_CASE, builders.stale(0), FREE)
    storms = [process(url, runs, "storm", result.result_id, "40") for _ in range(3)]
    assert end(*storms) == [0, 0, 0]
    ledger = Ledger(url)
    assert len(list(runs.iterdir())) == 1
    assert len(ledger.decisions()) == 1


@pytest.mark.slow
@proves(Promise.ONE_RETRAINING, "the sweep finds the claim: one run")
@pytest.mark.parametrize("moment", ["die-before", "die-after"])
def test_a_process_killed_at_the_start_of_a_run_leaves_one_run(
    url: str, runs: Path, moment: str
) -> None:
    result = Ledger(url).store_result(MODEL, USE_CASE, builders.stale(0), FREE)
    assert end(process(url, runs, moment, result.result_id)) == [-signal.SIGKILL]
    assert len(Ledger(url).claims(ClaimState.CLAIMED)) == 1
    assert end(process(url, runs, "sweep"), process(url, runs, "sweep")) == [0, 0]
    assert len(list(runs.iterdir())) == 1
    assert len(Ledger(url).claims(ClaimState.STARTED)) == 1


def test_a_database_that_is_away_is_no_decision_and_names_no_password() -> None:
    address = f"postgresql://falaj:hunter2@127.0.0.1:{free_port()}/falaj"
    with pytest.raises(TransientError, match=r"falaj:\*\*\*@127.0.0.1") as refused:
        Ledger(address)
    assert "hunter2" not in str(refused.value)


def test_the_command_lists_decisions_and_prints_them_as_json(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decisions"]) == 0
    assert capsys.readouterr().out.startswith("No such decision is recorded")
    controller = Controller(settings.metadata_url)
    controller.see(builders.stale(0))
    controller.see(builders.faulty(1))

    assert main(["decisions"]) == 0
    said = capsys.readouterr().out
    assert "retrain, acts, run run-0: started" in said
    assert said.index("nothing, alerts") < said.index("retrain, acts")
    assert main(["decisions", "--json", "--action", "retrain", "--since", "2020-01-01"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert (made["outcome"], made["evidence"]["auc_change"]["value"]) == ("acts", -0.1)
