from __future__ import annotations

from pathlib import Path

from tests.support.training.writer_kills import kill_and_look


def test_kill_9_at_any_moment_leaves_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    kill_and_look([str(tmp_path)], num_kills=5, seed=1)
