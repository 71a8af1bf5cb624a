import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tasks.contracts.training import EpochMetrics
from tasks.kernel.errors import DataContractError, TransientError
from tests.support.data.builders import COLUMNS, frame
from tests.support.host.processes import pids_whose_command_holds, python, wait_until
from tests.support.ranks import runs

GONE_WITHIN_S = 10


def test_a_killed_rank_is_transient_and_the_next_attempt_resumes(tmp_path: Path) -> None:
    def kill_rank_1(metrics: EpochMetrics) -> None:
        if metrics.epoch == 1:
            os.kill(runs.pid_of_rank(1, tmp_path), signal.SIGKILL)

    with pytest.raises(TransientError, match=r"^rank 1 was killed \(signal 9; out of memory\?\)"):
        runs.train(tmp_path, runs.CONFIG, kill_rank_1)
    assert not pids_whose_command_holds(str(tmp_path))
    model = runs.train(tmp_path)
    runs.assert_no_kept_epoch_is_repeated(runs.log_of(model, tmp_path))
    assert [metrics.epoch for metrics in model.epochs] == list(range(runs.CONFIG.max_epochs))


@pytest.mark.slow
def test_kill_9_of_the_driver_leaves_no_process_and_a_rerun_completes_on_another_world_size(
    tmp_path: Path,
) -> None:
    line = ("-m", "tests.support.ranks.runs", str(tmp_path))
    with python(*line, stdout=subprocess.PIPE) as driver:
        assert driver.stdout.readline() == "epoch 0\n"
        driver.kill()
    nobody = "no process is left", GONE_WITHIN_S
    wait_until(lambda: not pids_whose_command_holds(str(tmp_path)), *nobody)
    model = runs.train(tmp_path, runs.config(**runs.on_ranks(1)))
    runs.assert_no_kept_epoch_is_repeated(runs.log_of(model, tmp_path))
    assert len(runs.losses(model.epochs)) == runs.CONFIG.max_epochs


def test_the_error_of_one_rank_is_a_sentence_that_names_it(tmp_path: Path) -> None:
    rows = frame(runs.NUM_ROWS).astype({COLUMNS.label: "float64"})
    rows.loc[40, COLUMNS.label] = 7.0
    rows.to_parquet(tmp_path / "snapshot.parquet", row_group_size=256, index=False)
    with pytest.raises(DataContractError) as caught:
        runs.run_ranks(tmp_path, runs.CONFIG, tmp_path / "snapshot.parquet")
    assert re.match(r"rank [01]: DataContractError: 1 of \d+ rows have a label", str(caught.value))
    assert "flight_id is 40" in str(caught.value)
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_forced_stall_ends_with_an_error(tmp_path: Path) -> None:
    stalling = runs.config(stall_shutdown_s=3)
    with pytest.raises(TransientError, match="rank 1 did not answer and was stopped") as caught:
        runs.run_ranks(tmp_path, stalling, tmp_path / "none", "tests.support.ranks.stalling_worker")
    assert "rank 0: HorovodInternalError" in str(caught.value)
    assert "stalled for longer than 3 seconds" in (tmp_path / "run" / "training.log").read_text()
