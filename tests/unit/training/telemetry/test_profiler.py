from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tasks.training.telemetry.profiler import StepProfiler, profile_files


def profile(folder: Path, num_steps: int, fails: bool = False) -> None:
    weights = torch.rand(64, 64, requires_grad=True)
    with StepProfiler(folder, 1, 3, with_timeline=False) as profiled:
        for _ in range(num_steps):
            (torch.rand(32, 64) @ weights).square().sum().backward()
            profiled.step()
        if fails:
            raise ValueError("broken")


def test_a_profile_of_real_steps_is_kept_with_its_trace(tmp_path: Path) -> None:
    profile(tmp_path, num_steps=12)
    [trace] = profile_files(tmp_path)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert list(tmp_path.iterdir()) == [trace]


def test_a_training_that_ends_early_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile(tmp_path, num_steps=6)
    assert "ended before the 7 steps" in caplog.text


def test_a_training_that_failed_leaves_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"):
        profile(tmp_path, num_steps=5, fails=True)
    assert list(tmp_path.iterdir()) == []
