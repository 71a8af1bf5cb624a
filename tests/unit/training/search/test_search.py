import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tasks.contracts.training import StudyRecord
from tasks.kernel.errors import ConfigurationError, StorageError, TrainingError, TransientError
from tasks.training.config import TrainingConfig
from tasks.training.search.storage import StudyStorage
from tasks.training.search.study import WARM_UP_EPOCHS
from tests.support.host.processes import python
from tests.support.services.servers import postgres_server
from tests.support.training.trials import Trainer, auc_of, open_study, run_search, search


def points(record: StudyRecord) -> list[dict[str, float | int | str]]:
    return [trial.point for trial in record.trials]


@pytest.mark.parametrize("rule", ["tpe", pytest.param("random", marks=pytest.mark.slow)])
def test_a_search_runs_its_trials_and_names_the_best(tmp_path: Path, rule: str) -> None:
    trainer = Trainer()
    record = run_search(tmp_path, search(num_trials=12, sampler=rule, pruner="none"), trainer)
    assert [t.number for t in record.trials] == list(range(12))
    assert {t.state for t in record.trials} == {"complete"}
    assert len(trainer.trained) == 12
    best = max(record.trials, key=lambda t: (t.auc or 0, -t.number))
    assert record.best == best.number
    assert best.auc == max(auc_of(c, c.max_epochs - 1) for c in trainer.trained)
    assert record.ended_because == "num_trials=12 trials are done"
    assert sum(record.importance.values()) == pytest.approx(1)
    assert record.importance["learning_rate"] > record.importance["num_bins"]


@pytest.mark.slow
def test_bad_trials_end_early_and_the_best_one_never_does(tmp_path: Path) -> None:
    trainer = Trainer()
    record = run_search(tmp_path, search(num_trials=20, sampler="random"), trainer)
    states = Counter(t.state for t in record.trials)
    assert states["pruned"] >= 3
    assert states["complete"] >= 3
    for trial in record.trials:
        if trial.state == "pruned":
            assert WARM_UP_EPOCHS < len(trial.epochs) < 8
            assert f"rule median after epoch {len(trial.epochs)} of 8" in trial.reason
    whole = max(auc_of(c, 7) for c in trainer.trained)
    assert record.trials[record.best].auc == pytest.approx(whole, abs=0.05)
    assert not list((tmp_path / "work" / "small-1").iterdir())  # no run directory is left


@pytest.mark.slow
def test_a_search_cut_off_anywhere_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    config = search(num_trials=14)
    unbroken = run_search(tmp_path / "unbroken", config, Trainer())

    class PowerCut(BaseException):
        pass

    num_epochs, cut_after = 0, [3, 12, 20, 33, 41]

    def stumble(_: TrainingConfig, epoch: int) -> None:
        nonlocal num_epochs
        num_epochs += 1
        if cut_after and num_epochs == cut_after[0]:
            cut_after.pop(0)
            raise PowerCut

    trainer = Trainer(stumble)
    cuts = 0
    while True:
        try:
            broken = run_search(tmp_path / "broken", config, trainer)
            break
        except PowerCut:
            cuts += 1
    assert cuts == 5
    assert points(broken) == points(unbroken)
    assert [t.auc for t in broken.trials] == [t.auc for t in unbroken.trials]
    assert [t.state for t in broken.trials] == [t.state for t in unbroken.trials]
    # Each cut-off trial was begun once more, in the same folder; no finished one was.
    assert len(trainer.folders) == 14 + cuts
    assert len(set(trainer.folders)) == 14


@pytest.mark.slow
def test_a_training_that_cannot_succeed_fails_its_trial_alone(tmp_path: Path) -> None:
    def stumble(config: TrainingConfig, epoch: int) -> None:
        if config.learning_rate > 0.01 and epoch == 1:
            raise TrainingError("the loss of epoch 1 is nan")

    record = run_search(tmp_path, search(num_trials=12), Trainer(stumble))
    failed = [t for t in record.trials if t.state == "failed"]
    assert failed
    assert all(t.reason == "the loss of epoch 1 is nan" for t in failed)
    assert all(len(t.epochs) == 1 for t in failed)
    assert record.best is not None


def test_a_lost_trial_is_taken_up_again_and_given_up_after_its_retries(tmp_path: Path) -> None:
    losses = [2, 9]

    def stumble(config: TrainingConfig, epoch: int) -> None:
        if epoch == 2 and losses and losses[0]:
            losses[0] -= 1
            raise TransientError("rank 1 was killed")
        if epoch == 7 and losses and not losses[0]:
            losses.pop(0)

    record = run_search(tmp_path, search(num_trials=3, pruner="none"), Trainer(stumble))
    assert [t.state for t in record.trials] == ["complete", "failed", "failed"]
    assert [t.attempts for t in record.trials] == [3, 3, 3]
    assert record.trials[1].reason == "lost 3 times: rank 1 was killed"


def test_what_says_nothing_about_a_point_stops_the_search_and_is_taken_up(tmp_path: Path) -> None:
    def stumble(config: TrainingConfig, epoch: int) -> None:
        raise StorageError("the disk is full")

    config = search(num_trials=4)
    with pytest.raises(StorageError, match="the disk is full"):
        run_search(tmp_path, config, Trainer(stumble))
    assert len(open_study(tmp_path, config).running()) == 1
    assert [t.number for t in run_search(tmp_path, config, Trainer()).trials] == [0, 1, 2, 3]


def test_no_trial_is_started_after_the_budget_is_spent(tmp_path: Path) -> None:
    config = search(num_trials=50, budget_s=20.0, pruner="none")
    spent = run_search(tmp_path / "b", config, Trainer())
    assert len(spent.trials) == 3  # of 8 s each: the third is over the 20 s
    assert "budget_s=20" in spent.ended_because


def test_two_searches_do_not_drive_one_study(tmp_path: Path) -> None:
    storage = StudyStorage.of("", tmp_path, {})
    with storage.held("small-1"):
        with storage.held("small-2"):
            pass
        with pytest.raises(TransientError, match="another process drives study small-1"):
            with storage.held("small-1"):
                pass
    with storage.held("small-1"):
        pass


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "studies.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(
        StorageError, match=r"not a database.*bring a damaged database with `falaj restore`"
    ):
        open_study(tmp_path, search())


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "neither STUDIES nor STUDIES_FILE is set"),
        ({"STUDIES": "mysql://u:hunter2@h/d"}, "no PostgreSQL address"),
        ({"STUDIES": "hunter2"}, "no PostgreSQL address"),
        ({"STUDIES_FILE": "/nowhere"}, "cannot be read"),
    ],
)
def test_a_wrong_address_is_refused_and_never_shown(
    tmp_path: Path, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        StudyStorage.of("STUDIES", tmp_path, environment)
    assert "hunter2" not in str(caught.value)


def test_a_server_that_is_away_is_worth_another_attempt(tmp_path: Path) -> None:
    away = {"STUDIES": "postgresql://user:hunter2@127.0.0.1:9/studies?connect_timeout=5"}
    storage = StudyStorage.of("STUDIES", tmp_path, away)
    with pytest.raises(TransientError, match="does not answer") as caught:
        storage.open()
    assert "hunter2" not in str(caught.value)


@pytest.mark.slow
def test_a_study_on_postgresql_ends_like_one_on_sqlite(tmp_path: Path) -> None:
    config = search(num_trials=8, storage="STUDIES")
    with postgres_server(tmp_path) as uri:
        (tmp_path / "secret").write_text(f"{uri}\n")
        storage = StudyStorage.of("STUDIES", tmp_path, {"STUDIES_FILE": str(tmp_path / "secret")})
        half = run_search(tmp_path, config.model_copy(update={"num_trials": 4}), Trainer(), storage)
        assert len(half.trials) == 4
        whole = run_search(tmp_path, config, Trainer(), storage)
        elsewhere = StudyStorage.of("STUDIES", tmp_path / "other-host", {"STUDIES": uri})
        with storage.held("small-1"):
            with pytest.raises(TransientError, match="another process"):
                with elsewhere.held("small-1"):
                    pass
        with elsewhere.held("small-1"):
            pass
    assert whole.storage == "postgresql"
    expected = run_search(tmp_path / "lite", config.model_copy(update={"storage": ""}), Trainer())
    # But for the seconds of a trial that ended early, which are the wall's.
    one, other = (
        [t.model_copy(update={"seconds": 0.0}) for t in r.trials] for r in (whole, expected)
    )
    assert one == other


def test_an_interrupted_search_ends_at_once_and_leaves_its_trial_begun(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time; from pathlib import Path\n"
        "from tests.support.training.trials import Trainer, run_search, search\n"
        # A shell starts what runs in its background with this signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def stumble(config, epoch):\n"
        "    print('training', flush=True)\n"
        "    time.sleep(600)\n"
        "run_search(Path(sys.argv[1]), search(num_trials=2), Trainer(stumble))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with python("-c", program, str(tmp_path), **pipes) as running:
        assert running.stdout.readline() == "training\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)  # not the 600 s of the trial
    assert "KeyboardInterrupt" in errors
    assert [p.number for p in open_study(tmp_path, search(num_trials=2)).running()] == [0]
