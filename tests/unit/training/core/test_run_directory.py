import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.kernel.errors import StorageError, TransientError
from tasks.kernel.files import write_atomically
from tasks.training.core.run_directory import RankError, RunDirectory, exclusive
from tests.support.data.builders import epoch
from tests.support.training.reading_ranks import training_job

JOB = training_job()


def test_a_new_attempt_keeps_checkpoints_and_drops_old_reports(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.prepare(JOB)
    kept = run.path / "checkpoints" / "epoch-0001.pt"
    write_atomically(kept, b"state")
    run.write_error(
        RankError(rank=0, kind="E", message="", traceback="", secondary=False, time_s=0)
    )
    run.rewrite_epochs([epoch(0)])
    run.prepare(JOB)
    assert run.read_job() == JOB
    assert run.read_errors() == []
    assert run.read_epochs() == []
    assert run.read_result() is None
    assert kept.read_bytes() == b"state"


def test_a_read_only_folder_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(StorageError, match="Read-only file system"):
        RunDirectory(tmp_path / "run").prepare(JOB)


def test_a_second_driver_is_refused_until_all_that_hold_the_lock_are_gone(tmp_path: Path) -> None:
    with suppress(KeyError), exclusive(tmp_path / "run", 0) as lock:  # a driver that fails
        rank = subprocess.Popen(["sleep", "300"], pass_fds=(lock,))
        raise KeyError
    with (
        pytest.raises(TransientError, match="is already training"),
        exclusive(tmp_path / "run", 0.2),
    ):
        raise AssertionError("must not be entered")
    rank.kill()
    rank.wait()
    with exclusive(tmp_path / "run", 1):
        assert (tmp_path / "run.lock").exists()
    assert not (tmp_path / "run.lock").exists()
