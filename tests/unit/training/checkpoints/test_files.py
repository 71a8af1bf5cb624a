from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.kernel.errors import StorageError
from tasks.training.checkpoints.files import serialized, write_file


def test_a_written_file_is_read_without_running_anything(tmp_path: Path) -> None:
    write_file(tmp_path / "best.pt", serialized({"epoch": 3, "network": {"w": torch.ones(3)}}))
    read = torch.load(tmp_path / "best.pt", weights_only=True)
    assert read["epoch"] == 3
    assert read["network"]["w"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(tmp_path: Path) -> None:
    write_file(tmp_path / "best.pt", b"before")
    (tmp_path / ".best.pt.aside").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left on device"):
        write_file(tmp_path / "best.pt", b"after")
    assert (tmp_path / "best.pt").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]
