"""The real training loop on ranks that come and go."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tasks.contracts.training import EpochMetrics
from tasks.kernel.settings import ArtifactStore
from tests.support.host.processes import pids_whose_command_holds
from tests.support.ranks.runs import config, losses, on_ranks, train

pytestmark = pytest.mark.slow

ELASTIC = {"elastic": {"enabled": True, "slots_per_host": 2}, "max_epochs": 12, "patience": 12}


def pid_of_a_rank(folder: Path) -> int:
    for pid in pids_whose_command_holds(str(folder)):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"launch.worker" in command and b"guard.py" not in command:
            return pid
    raise AssertionError(f"no rank runs in {folder}")


def test_a_training_that_loses_a_rank_ends_as_if_it_had_not(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(metrics: EpochMetrics) -> None:
        if metrics.epoch >= 1 and not killed:
            killed.append(pid_of_a_rank(tmp_path))
            os.kill(killed[0], signal.SIGKILL)

    model = train(tmp_path, config(**ELASTIC), kill_one)
    plain = train(tmp_path / "plain", config(**{**ELASTIC, "elastic": {}}, **on_ranks(1)))
    assert killed
    assert not pids_whose_command_holds(str(tmp_path))
    np.testing.assert_allclose(losses(model.epochs), losses(plain.epochs), atol=2e-4)
    told = json.loads(ArtifactStore(tmp_path / "store").path(model.kept[-1]).read_text())
    assert "lost" in {event["kind"] for event in told["events"]}
    assert [group["size"] for group in told["groups"]][:2] in ([2, 1], [1, 2])
