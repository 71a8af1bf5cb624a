from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.suite.promises import Promise, proves

NAMESPACE = ["unshare", "--mount", "--propagation", "private"]


@functools.cache
def can_mount() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    return subprocess.run([*NAMESPACE, *mount], capture_output=True).returncode == 0


@proves(Promise.FULL_DISK, "a sentence; the newest checkpoint is whole")
def test_a_disk_that_fills_up_costs_only_the_checkpoint_that_did_not_fit(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("a disk of 4 MiB needs root and a mount namespace")
    program = [sys.executable, "-m", "tests.support.training.full_disk", str(tmp_path)]
    done = subprocess.run(
        [*NAMESPACE, *program], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "No space left on device" in seen["refused"]
    assert seen["newest"] == seen["loaded"] == seen["epoch"] - 1 >= 2
    assert seen["leftovers"] == []
