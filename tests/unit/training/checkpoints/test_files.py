from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch

from tasks.errors import StorageError
from tasks.training.checkpoints.files import (
    NUM_KEPT,
    checkpoint_path,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)


def save_epochs(folder: Path, count: int) -> None:
    for epoch in range(count):
        save_checkpoint(folder, epoch, {"epoch": epoch, "weights": {"w": torch.ones(3) * epoch}})


def test_the_newest_checkpoint_is_found_and_older_ones_are_dropped(tmp_path: Path) -> None:
    save_epochs(tmp_path, 4)
    assert newest_checkpoint(tmp_path) == 3
    assert load_checkpoint(tmp_path, 3)["weights"]["w"].tolist() == [3, 3, 3]
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("*.sha256"))) == NUM_KEPT


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def test_a_truncated_checkpoint_is_passed_over_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_epochs(tmp_path, 3)
    os.truncate(checkpoint_path(tmp_path, 2), 100)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == 1
    assert "epoch-0002.pt" in caplog.text
    assert "damaged, passed over" in caplog.text


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    save_epochs(tmp_path, 2)
    path = checkpoint_path(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert newest_checkpoint(tmp_path) == 0


def test_a_checkpoint_without_its_digest_is_incomplete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_epochs(tmp_path, 2)
    checkpoint_path(tmp_path, 1).with_suffix(".sha256").unlink()
    assert newest_checkpoint(tmp_path) == 0
    assert "incomplete, passed over" in caplog.text


def test_a_damaged_checkpoint_is_replaced_when_its_epoch_is_done_again(tmp_path: Path) -> None:
    save_epochs(tmp_path, 2)
    checkpoint_path(tmp_path, 1).write_bytes(b"")
    save_checkpoint(tmp_path, 1, {"epoch": 1})
    assert newest_checkpoint(tmp_path) == 1


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_epochs(tmp_path, 1)
    before = sorted(path.name for path in tmp_path.iterdir())

    def full_disk(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(StorageError, match="No space left on device"):
        save_checkpoint(tmp_path, 1, {"epoch": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert newest_checkpoint(tmp_path) == 0
