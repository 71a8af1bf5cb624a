"""YAML in which a name written twice is an error, and what a merge replaces is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.strict_yaml import read_yaml


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


def test_a_folder_in_its_place_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="use_case cannot be read: Is a directory"):
        read_yaml(tmp_path, "use_case")


def test_a_merge_may_be_overridden(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n"
    assert read(tmp_path, text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 3, "y": 4},
    }
