"""A loop in training that is cancelled, evicted, retried from either UI, or has to wait its turn.

On the platform as a user starts it, with the requests that the buttons of Prefect's UIs send.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.host.processes import wait_until
from tests.support.platform.accounts import STAGES
from tests.support.platform.whole_platform import (
    FINAL,
    LIMIT_S,
    RUN,
    WholePlatform,
    environment_of,
    lives,
    whole_platform,
)
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

GONE_WITHIN_S = 5
"""Promise: the processes of a cancelled training are gone after so many seconds."""

LONG = {"max_epochs": 400, "patience": 400}
CANCEL: dict[str, object] = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True}
"""What the button Cancel of both UIs sends."""

AGAIN = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholePlatform]:
    with whole_platform(tmp_path_factory.mktemp("interrupted")) as platform:
        yield platform


@pytest.fixture(autouse=True)
def _nothing_goes_on(platform: WholePlatform) -> Iterator[None]:
    """End what a test that failed has left running: one loop at a time has the devices."""
    yield
    going_on = {"flow_runs": {"state": {"type": {"not_any_": sorted(FINAL)}}}, "limit": 200}
    for run in platform.ask("POST", "/flow_runs/filter", going_on):
        if not run["auto_scheduled"]:
            platform.ask("POST", f"/flow_runs/{run['id']}/set_state", CANCEL)


def state_type(platform: WholePlatform, run: str) -> str:
    return str(platform.state_of(run)["type"])


def in_training(platform: WholePlatform, **training: Any) -> str:
    """Start a loop on new rows; returns once its ranks have written a checkpoint."""
    platform.renew_data()
    platform.until_well()
    before = set(platform.home.glob("training/*"))
    loop = platform.start_loop(training=training)

    def has_checkpoint() -> bool:
        assert state_type(platform, loop) not in FINAL, platform.state_of(loop)
        new = set(platform.home.glob("training/*")) - before
        log = "".join(f.read_text() for folder in new for f in folder.glob("**/training.log"))
        return bool(platform.training("rank")) and "epoch 2:" in log

    wait_until(has_checkpoint, f"ranks that train: {platform.stage_runs(loop)}", LIMIT_S)
    return loop


def of_training(platform: WholePlatform, loop: str) -> list[psutil.Process]:
    """Guard, ranks, and the engine that started them."""
    engines = [e for e in platform.engines() if environment_of(e).get(RUN) != loop]
    return [*engines, *platform.training("guard"), *platform.training("rank")]


@proves(Promise.NO_ORPHANS, "cancelled: processes gone in 5 s, no lease, no slot")
@pytest.mark.parametrize("also_its_stages", [False, True])
def test_cancel_ends_a_training_within_seconds_and_leaves_nothing(
    platform: WholePlatform, also_its_stages: bool
) -> None:
    loop = in_training(platform, **LONG)
    processes = of_training(platform, loop)
    runs = [loop]
    if also_its_stages:  # the box that the dialog offers
        runs += [r["id"] for r in platform.stage_runs(loop) if r["state_type"] not in FINAL]
    for run in runs:
        assert platform.ask("POST", f"/flow_runs/{run}/set_state", CANCEL)["status"] == "ACCEPT"
    begun = time.monotonic()
    wait_until(lambda: not any(map(lives, processes)), "the training's processes are gone", 120)
    gone_s = time.monotonic() - begun
    platform.check_all_ended()
    assert state_type(platform, loop) == "CANCELLED"
    stages = [run["state_name"] for run in platform.stage_runs(loop)]
    assert stages == ["Completed", "Cancelled"]
    assert gone_s <= GONE_WITHIN_S


@proves(Promise.EVICTION, "completed; no stage and no kept epoch repeated")
@pytest.mark.parametrize("evicted", ["worker", "process group of the run"])
def test_a_training_whose_worker_is_evicted_goes_on_and_repeats_nothing(
    platform: WholePlatform, evicted: str
) -> None:
    models = set(platform.home.glob("artifacts/models/*"))
    loop = in_training(platform, max_epochs=200, patience=200)
    if evicted == "worker":
        worker = platform.service("worker-cpu")
        worker.terminate()
    else:  # as Kubernetes does with what it wants to move
        engines = [e for e in platform.engines() if environment_of(e)[RUN] != loop]
        os.killpg(engines[0].pid, signal.SIGTERM)
    platform.check_completed_once(loop)
    assert len(platform.account.stage_runs(loop)["training"]) == 2
    [folder] = set(platform.home.glob("artifacts/models/*")) - models
    text = "".join(file.read_text() for file in folder.glob("**/*.log"))
    done = re.findall(r"rank 0 \| DEBUG epoch (\d+): train", text)
    assert len(done) - len(set(done)) <= 1, "only the epoch that was cut off is done again"


@contextmanager
def in_the_way(folder: Path) -> Iterator[None]:
    """A file where a folder of the store should be: no stage can write there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f"{folder.name}.aside")
    if folder.exists():
        folder.rename(aside)
    folder.write_text("in the way")
    try:
        yield
    finally:
        folder.unlink()
        if aside.exists():
            aside.rename(folder)


@proves(Promise.INTERRUPT, "retried by a click: finished stages are not repeated")
@pytest.mark.parametrize("force", [False, True], ids=["V1", "V2"])
def test_retry_in_the_ui_goes_on_from_the_failed_stage(
    platform: WholePlatform, force: bool
) -> None:
    platform.renew_data()
    platform.until_well()
    with in_the_way(platform.home / "artifacts" / "variants"):
        loop = platform.start_loop()
        wait_until(lambda: state_type(platform, loop) in FINAL, "the loop has failed", LIMIT_S)
        assert state_type(platform, loop) == "FAILED"
        assert platform.account.completions(loop) == {"feature-refresh": 1, "training": 1}
    clicked = {"state": AGAIN, "force": force}
    reply = platform.ask("POST", f"/flow_runs/{loop}/set_state", clicked)
    assert reply["status"] == "ACCEPT", reply
    wait_until(lambda: platform.state_of(loop)["run_count"] == 2, "the second attempt", LIMIT_S)
    platform.check_completed_once(loop)
    runs = platform.account.stage_runs(loop)
    attempts = {stage: len(states) for stage, states in runs.items()}
    assert attempts == {**dict.fromkeys(STAGES, 1), "conversion": 2}
