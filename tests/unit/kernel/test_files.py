"""Locks are held by one or shared by readers; YAML loses nothing in silence."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.files import is_held, locked, read_yaml


def test_a_lock_passes_to_the_one_who_waits(tmp_path: Path) -> None:
    file, order = tmp_path / "new" / "lock", list[str]()

    def second() -> None:
        with locked(file, wait_s=30):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(file):
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_who_does_not_wait_gets_the_error_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_held(file)
    assert not file.exists()
    with locked(file):
        assert is_held(file)
        with pytest.raises(TransientError), locked(file, wait_s=0):
            pass
        with (
            pytest.raises(ConfigurationError),
            locked(file, wait_s=0.05, held=lambda: ConfigurationError("taken")),
        ):
            pass
    assert not is_held(file)


def test_readers_share_it_and_keep_a_writer_out(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with locked(file, shared=True), locked(file, shared=True, wait_s=0):
        with pytest.raises(TransientError), locked(file, wait_s=0):
            pass


def test_a_child_that_inherits_it_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with locked(file) as lock:
        line = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(line, pass_fds=(lock,))
    assert is_held(file)
    child.kill()
    child.wait()
    assert not is_held(file)


def read(folder: Path, text: str) -> object:
    file = folder / "file.yaml"
    file.write_text(text)
    return read_yaml(file, file.name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: a is written twice"),
        ("a:\n  - {b: 1, b: 2}\n", "line 2: b is written twice"),
        ("a: 1\n---\nb: 2\n", "single document"),
        ("", "holds nothing"),
    ],
)
def test_nothing_is_lost_in_silence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"file\.yaml.*{said}"):
        read(tmp_path, text)


def test_a_merge_may_be_overridden(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n"
    assert read(tmp_path, text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 3, "y": 4},
    }
