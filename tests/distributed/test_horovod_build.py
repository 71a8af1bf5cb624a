"""The wheel that set-up built: its operations are right, and both of its cures work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import horovod
import horovod.torch as hvd
import pytest

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.ranks.rank_programs import run_on_ranks


def test_the_wheel_is_the_projects_own_and_has_what_training_needs() -> None:
    backend = (PROJECT_ROOT / "infra/horovod/pyproject.toml").read_text()
    assert f'version = "{horovod.__version__}' in backend
    assert hvd.gloo_built()
    assert not hvd.mpi_built()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_operations_on_every_type_agree_with_numpy(tmp_path: Path, num_ranks: int) -> None:
    run_on_ranks("tests.support.ranks.op_checks", tmp_path, num_ranks)


def missing_for_namespaces() -> str | None:
    """Why network namespaces cannot be made here; None where they can."""
    absent = [tool for tool in ("ip", "mount", "nsenter", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if os.geteuid() != 0:
        return "not run by root"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "a1", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else None


@pytest.mark.slow
def test_all_traffic_takes_the_chosen_interface_where_a_hosts_own_name_is_loopback(
    tmp_path: Path,
) -> None:
    if reason := missing_for_namespaces():
        pytest.skip(f"two hosts need network namespaces: {reason}")
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.elastic.two_networks", str(tmp_path)],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert run.stdout.count("uses ['10.77.9.") == 2
