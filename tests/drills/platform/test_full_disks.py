"""The disk is full: under the loop at every stage, and under a platform that runs."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.contracts.base import Artifact
from tasks.kernel.settings import URI_SCHEME, ArtifactStore
from tests.support.host.disks import small_disk
from tests.support.host.processes import processes_of
from tests.support.platform.commands import Platform
from tests.support.platform.loops import Loop, loop_repository
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

MB = 1_000_000
RUN_LIMIT_S = 3600
WHAT_TO_DO = ("free space", "free some space")
MOMENTS = ("land-raw-rows: Finished", "build-training-set: Finished", "epoch 1:")
"""What a run has just said when another program fills the disk."""


@proves(Promise.FULL_DISK, "a sentence, nothing half written; with more space it completes")
@proves(Promise.INTERRUPT, "stopped by a full disk at each stage: finished stages are kept")
def test_a_loop_whose_disk_fills_up_says_so_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with small_disk(home, 400 * MB) as disk:
        loop, built = Loop(home, loop_repository(tmp_path)), dict[str, float]()
        for moment in MOMENTS:
            with loop.start("run") as process:
                said = "".join(until(process, moment))
                with disk.filled():
                    said += process.communicate(timeout=RUN_LIMIT_S)[0]
                    check_refusal(loop, process.returncode, said)
            before, built = built, builds(home)
            assert before.items() <= built.items(), "a finished stage was lost"
        code, said = loop.run("run", limit_s=RUN_LIMIT_S)
        assert code == 0, said
        assert built.items() <= builds(home).items(), "a finished stage was repeated"
        assert loop.record.promotion.promoted
        check_artifacts(home)


def until(process: subprocess.Popen[str], moment: str) -> Iterator[str]:
    """What a run says, up to a moment."""
    for line in process.stdout:
        yield line
        if moment in line:
            return
    raise AssertionError(f"the run ended before {moment!r}")


def check_refusal(loop: Loop, code: int, said: str) -> None:
    """What a run says and leaves that met a full disk."""
    assert code == 1, said
    assert any(words in said.lower() for words in WHAT_TO_DO), said
    assert "Traceback" not in said
    assert processes_of(loop.home) == []
    check_artifacts(loop.home)


def check_artifacts(home: Path) -> None:
    """Every artifact that can be seen is whole, by its own digests; nothing is left aside."""
    store = ArtifactStore(home / "artifacts")
    for folder in (home / "artifacts").glob("*/*"):
        assert not folder.name.startswith("."), f"{folder} was left half written"
        for artifact in artifacts_named(json.loads((folder / "value.json").read_text())):
            assert store.holds(artifact), f"{folder}: {artifact.uri}"


def artifacts_named(value: object) -> list[Artifact]:
    """Artifacts of the store in a stored value, at any depth; sources lie elsewhere."""
    if isinstance(value, dict):
        if value.keys() == Artifact.model_fields.keys():
            named = Artifact.model_validate(value)
            return [named] if named.uri.startswith(URI_SCHEME) else []
        value = list(value.values())
    if isinstance(value, list):
        return [artifact for item in value for artifact in artifacts_named(item)]
    return []


def builds(home: Path) -> dict[str, float]:
    """Stages that were finished: which, and when their result was published."""
    values = (home / "artifacts").glob("*/*/value.json")
    return {str(file.relative_to(home)): file.stat().st_mtime for file in values}


@proves(Promise.FULL_DISK, "doctor says it; with space again, the platform works by itself")
def test_a_platform_on_a_full_disk_is_told_of_and_works_again_with_space(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with small_disk(home, 400 * MB) as disk, Platform(home) as platform:
        with disk.filled():
            code, said = platform.run("doctor")
            assert code == 1, said
            assert "free some space" in said
            assert f"GB free at {home}" in said
            assert "Traceback" not in said
            code, said = platform.run("status")
            assert "Traceback" not in said
        platform.until_well()
        run = platform.start_run(0.5)
        platform.until_state(run, "COMPLETED")
