from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from tasks.training.telemetry.profiler import StepProfiler, profile_files


def profile(folder: Path, num_steps: int) -> None:
    weights = torch.rand(64, 64, requires_grad=True)
    with StepProfiler(folder, 1, 3, with_timeline=False) as profiled:
        for _ in range(num_steps):
            (torch.rand(32, 64) @ weights).square().sum().backward()
            profiled.step()


def test_a_profile_of_real_steps_is_kept_with_its_trace(tmp_path: Path) -> None:
    profile(tmp_path, num_steps=12)
    [trace] = profile_files(tmp_path)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert list(tmp_path.iterdir()) == [trace]
