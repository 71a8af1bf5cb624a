"""A process has one name; its scratch folders go with it, or with the next sweep."""

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tasks.kernel.files import UNSEEN_LIMIT_S, remove_abandoned, scratch_folder, temporary_files
from tasks.kernel.process import TOKEN, ProcessName, start_of
from tests.support.host.processes import run_python, wait_until

MINE = ProcessName.of_this()
DEAD = MINE.model_copy(update={"start": MINE.start + 1})
CONTAINED = MINE.model_copy(update={"space": "pid:[1]", "start": 1})


def folder_of(process: ProcessName, parent: Path, prefix: str = "work") -> Path:
    folder = parent / f"{prefix}-{process.token}-abc"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("x")
    return folder


def test_a_scratch_folder_is_private_and_gone_in_the_end(tmp_path: Path) -> None:
    with scratch_folder("work", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
        remove_abandoned(tmp_path, "work")
        assert (folder / "file").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead, alive = folder_of(DEAD, tmp_path), folder_of(MINE, tmp_path)
    others = [folder_of(DEAD, tmp_path, "other"), tmp_path / "work-of-mine", tmp_path / "work-1-x"]
    for path in others[1:]:
        path.mkdir()
    file = tmp_path / f"work-{DEAD.token}-file"
    file.write_text("x")
    with scratch_folder("work", tmp_path):
        assert not dead.exists()
        assert not file.exists()
        assert all(path.exists() for path in (alive, *others))


def test_a_process_of_another_container_keeps_its_folder_until_nothing_changes_for_a_week(
    tmp_path: Path,
) -> None:
    folder = folder_of(CONTAINED, tmp_path)
    remove_abandoned(tmp_path, "work")
    assert folder.exists()
    old = time.time() - UNSEEN_LIMIT_S - 60
    for path in (folder, folder / "deep"):
        os.utime(path, (old, old))
    remove_abandoned(tmp_path, "work")
    assert folder.exists()  # a file in it is younger
    os.utime(folder / "deep" / "file", (old, old))
    remove_abandoned(tmp_path, "work")
    assert not folder.exists()


def test_temporary_files_of_a_process_and_of_what_it_starts_are_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    dead = folder_of(DEAD, tmp_path, "falaj")
    with temporary_files():
        own = Path(tempfile.mkdtemp())
        program = "import tempfile; print(tempfile.gettempdir())"
        started = run_python("-c", program, check=True)
        assert Path(started.stdout.strip()) == own.parent
        assert list(tmp_path.iterdir()) == [own.parent]
        assert own.parent != dead
    assert list(tmp_path.iterdir()) == []
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(tmp_path)


def test_a_process_is_known_by_its_start_and_not_by_its_number_alone() -> None:
    assert not MINE.has_ended()
    assert DEAD.has_ended()
    assert not CONTAINED.is_visible_to(MINE)


def test_a_process_that_has_ended_and_was_not_reaped_has_ended() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        start = start_of(child.pid)
        name = MINE.model_copy(update={"pid": child.pid, "start": start})
        assert not name.has_ended()
        child.kill()
        wait_until(name.has_ended, "the end, unreaped")
    finally:
        child.kill()
        child.wait()


def test_a_token_names_a_process_to_those_who_can_see_it_and_to_nobody_else() -> None:
    assert re.fullmatch(TOKEN, MINE.token)
    assert MINE.sees_alive(MINE.token) is True
    assert MINE.sees_alive(DEAD.token) is False
    for other in (CONTAINED, MINE.model_copy(update={"boot": "another"})):
        assert MINE.sees_alive(other.token) is None
