"""A whole loop's state is backed up while it runs, copied and moved, and goes on elsewhere."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.host.processes import wait_until
from tests.support.platform.commands import Platform
from tests.support.platform.loops import Loop, loop_repository


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_backup_of_a_running_loop_goes_on_and_one_of_a_finished_loop_repeats_nothing(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path / "first" / "home", loop_repository(tmp_path))
    backups = str(tmp_path / "backups")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(loop.succeed, "run", "--yes")
        finished = (loop.home / "artifacts").glob
        wait_until(lambda: any(finished("*/*/value.json")), "the first finished stage", 300)
        while not running.done():
            loop.succeed("backup", backups)
    running.result()
    names = loop.succeed("backup", backups, "--list").split()
    assert len(names) > 2

    early = Loop(tmp_path / "early", loop.repository)
    early.succeed("restore", backups, "--backup", names[len(names) // 2])
    early.succeed("run", "--yes")

    loop.succeed("backup", backups)
    shutil.move(loop.home, tmp_path / "away")
    late = Loop(tmp_path / "second" / "deeper" / "home", loop.repository)
    late.succeed("restore", backups)
    late.succeed("prune", "--older", "1d", "--yes")
    late.succeed("verify")
    before = late.store.num_builds
    late.succeed("run", "--yes")
    assert late.store.num_builds == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_copied_state_is_a_whole_platform_where_the_original_is_gone(
    loop: Loop, tmp_path: Path
) -> None:
    copy = Loop(tmp_path / "elsewhere" / "home", loop.repository)
    away = loop.home.with_name("away")
    shutil.copytree(loop.home, copy.home, symlinks=True)
    loop.home.rename(away)
    try:
        with Platform(copy.home, (), {"FALAJ_FEATURE_REPO": str(loop.repository.path)}) as platform:
            model = f"{platform.endpoint.serving_url}/v2/models/flight-delay"
            inputs = [
                {"name": one["name"], "datatype": one["datatype"], "shape": [1, width],
                 "data": [0] * width}
                for one in httpx.get(model).json()["inputs"]
                for width in one["shape"][1:]
            ]  # fmt: skip
            answer = httpx.post(f"{model}/infer", json={"inputs": inputs}, timeout=60).json()
            assert 0 < answer["outputs"][0]["data"][0] < 1
            before = copy.store.num_builds
            for words in (["verify"], ["--on-platform", "run", "--yes"], ["doctor"]):
                copy.succeed(*words)
            assert copy.store.num_builds == before, "it goes on with what the original made"
        assert not loop.home.exists(), "nothing has written there"
    finally:
        away.rename(loop.home)

    second = Loop(Path(shutil.copytree(copy.home, tmp_path / "b", symlinks=True)), loop.repository)
    code, shown = second.run("doctor")
    assert (code, f"from {copy.home}, which is there still" in shown) == (3, True), shown
    named = f"{copy.home}/results".encode()
    kept = [*copy.home.glob("**/*.db"), *(copy.home / "results").iterdir()]
    assert not [file for file in kept if named in file.read_bytes()]
