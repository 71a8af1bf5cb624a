from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tasks.training.launch import host
from tasks.training.launch.host import Host, count_gpus, cpu_quota


def test_this_host_has_a_core() -> None:
    seen = Host.of_this_process()
    assert 1 <= seen.num_cores <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5)])
def test_a_containers_share_of_time_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert cpu_quota(tmp_path) == quota


def test_a_host_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


class FakeNvml:
    """A driver that sees some GPUs, or is not there."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int | None) -> None:
        self._count = count

    def nvmlInit(self) -> None:  # noqa: N802
        if self._count is None:
            raise self.NVMLError

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int | None:  # noqa: N802
        return self._count


@pytest.mark.parametrize(
    ("present", "visible", "count"),
    [
        (None, None, 0),
        (4, None, 4),
        (4, "0,2", 2),
        (4, "", 0),
        (4, "-1", 0),
        (1, "0,1", 1),
        (2, "GPU-5f1c,GPU-77aa", 2),
    ],
)
def test_gpus_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, present: int | None, visible: str | None, count: int
) -> None:
    monkeypatch.setattr(host, "pynvml", FakeNvml(present))
    environment: dict[str, Any] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment) == count
