"""A whole loop's state is backed up while it runs, and goes on elsewhere."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.platform.loops import Loop, loop_repository


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_backup_of_a_running_loop_goes_on_and_one_of_a_finished_loop_repeats_nothing(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path / "first" / "home", loop_repository(tmp_path))
    backups = str(tmp_path / "backups")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(loop.run, "run", "--yes")
        while not running.done():
            code, shown = loop.run("backup", backups)
            assert code == 0, shown
    code, shown = running.result()
    assert code == 0, shown
    names = loop.run("backup", backups, "--list")[1].split()
    assert len(names) > 2

    early = Loop(tmp_path / "early", loop.repository)
    code, shown = early.run("restore", backups, "--backup", names[len(names) // 2])
    assert code == 0, shown
    code, shown = early.run("run", "--yes")
    assert code == 0, shown

    code, shown = loop.run("backup", backups)
    assert code == 0, shown
    shutil.move(loop.home, tmp_path / "away")
    late = Loop(tmp_path / "second" / "deeper" / "home", loop.repository)
    code, shown = late.run("restore", backups)
    assert code == 0, shown
    for words in (["prune", "--older", "1d", "--yes"], ["models", "verify"]):
        code, shown = late.run(*words)
        assert code == 0, shown
    before = late.store.num_builds
    code, shown = late.run("run", "--yes")
    assert code == 0, shown
    assert late.store.num_builds == before
