from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tasks.training.telemetry import profiler
from tasks.training.telemetry.profiler import (
    StepProfiler,
    kind_of,
    profile_files,
    profile_summary,
    profiler_variables,
    read_profiles,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::mm", "matmul"),
        ("aten::_scaled_dot_product_attention", "matmul"),
        ("aten::convolution_backward", "matmul"),
        ("aten::copy_", "move"),
        ("aten::embedding_dense_backward", "move"),
        ("aten::_fused_adamw_", "optimizer"),
        ("optimizer.step#adamw.step", "optimizer"),
        ("aten::_foreach_add_", "optimizer"),
        ("aten::empty", "allocate"),
        ("cudaMalloc", "allocate"),
        ("gloo:all_reduce", "exchange"),
        ("ncclkernel_allreduce", "exchange"),
    ],
)
def test_operations_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_summary_is_of_one_step() -> None:
    summary = profile_summary(0, 4, 8.0, {"aten::mm": 4.0, "aten::add": 2.0}, None)
    assert summary.step_s == 2.0
    assert summary.seconds["matmul"] == 1.0
    assert summary.top == (("aten::mm", 1.0), ("aten::add", 0.5))
    assert summary.operations_s == 1.5


def profile(folder: Path, num_steps: int, steps: int = 3) -> None:
    weights = torch.rand(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with StepProfiler(folder, 1, steps, with_timeline=False) as profiled:
        for _ in range(num_steps):
            optimizer.zero_grad()
            (torch.rand(32, 64) @ weights).square().sum().backward()
            optimizer.step()
            profiled.step()


def test_a_profile_of_real_steps_is_kept_with_its_trace(tmp_path: Path) -> None:
    profile(tmp_path, num_steps=12)
    [summary] = read_profiles(tmp_path)
    assert (summary.rank, summary.num_steps) == (1, 3)
    assert summary.seconds["matmul"] > 0
    assert summary.seconds["optimizer"] > 0
    assert summary.trace == "trace-00001.json.gz"
    events = json.loads(gzip.decompress((tmp_path / summary.trace).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert [p.name for p in profile_files(tmp_path)] == [summary.trace, "profile-00001.json"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_training_that_ends_early_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile(tmp_path, num_steps=6, steps=10)
    assert "ended after 6 steps, before the profile's 14 were done" in caplog.text
    assert [p.num_steps for p in read_profiles(tmp_path)] == [2]


def fail_under_the_profiler(folder: Path) -> None:
    with StepProfiler(folder, 0, 3, with_timeline=False) as profiled:
        for _ in range(5):
            profiled.step()
        raise ValueError("broken")


def test_a_training_that_failed_leaves_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"):
        fail_under_the_profiler(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_is_too_large_is_not_kept_but_its_summary_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiler, "MOST_TRACE_BYTES", 10)
    profile(tmp_path, num_steps=12)
    [summary] = read_profiles(tmp_path)
    assert summary.trace is None
    assert "too large and not kept" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["profile-00001.json"]


def test_only_horovod_needs_to_be_prepared_for_its_timeline() -> None:
    assert profiler_variables("horovod") == {"HOROVOD_TIMELINE": "DYNAMIC"}
    assert profiler_variables("torch") == {}
