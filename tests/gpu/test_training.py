from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.kernel.settings import ArtifactStore
from tests.support.ranks.runs import config, losses, on_ranks, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device"),
]

NUM_DEVICES = torch.cuda.device_count()


def test_training_on_a_gpu_matches_the_cpus_loss(tmp_path: Path) -> None:
    on_cpu = train(tmp_path / "cpu", config(**on_ranks(1)))
    on_gpu = train(tmp_path / "gpu", config(**on_ranks(1), device="cuda"))
    np.testing.assert_allclose(losses(on_gpu.epochs), losses(on_cpu.epochs), atol=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_over_nccl_match_the_cpus_loss(tmp_path: Path, name: str) -> None:
    """One rank on each device; with a single device the exchange is NCCL's all the same."""
    on_cpu = train(tmp_path / "cpu", config(**on_ranks(1)))
    changes = {"strategy": {"name": name}, "device": "cuda", **on_ranks(NUM_DEVICES)}
    on_gpus = train(tmp_path / "gpu", config(**changes))
    assert on_gpus.num_ranks == NUM_DEVICES
    np.testing.assert_allclose(losses(on_gpus.epochs), losses(on_cpu.epochs), atol=1e-3)


def test_horovods_ranks_exchange_over_nccl(tmp_path: Path) -> None:
    import horovod.torch as hvd

    if not hvd.nccl_built():
        pytest.skip("Horovod's wheel was built without NCCL: HOROVOD_GPU_OPERATIONS=NCCL")
    on_cpu = train(tmp_path / "cpu", config(**on_ranks(1)))
    on_gpus = train(tmp_path / "gpu", config(**on_ranks(NUM_DEVICES), device="cuda"))
    np.testing.assert_allclose(losses(on_gpus.epochs), losses(on_cpu.epochs), atol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_as_well_as_full(tmp_path: Path, precision: str) -> None:
    full = train(tmp_path / "full", config(**on_ranks(1), device="cuda"))
    changes = {"strategy": {"precision": precision}, "device": "cuda", **on_ranks(1)}
    mixed = train(tmp_path / "mixed", config(**changes))
    np.testing.assert_allclose(losses(mixed.epochs), losses(full.epochs), atol=0.05)


def test_a_device_tells_what_it_took(tmp_path: Path) -> None:
    model = train(tmp_path, config(**on_ranks(1), device="cuda", max_epochs=1))
    assert model.telemetry is not None
    assert len(model.telemetry.devices) == 1
    assert model.telemetry.energy.joules


def test_a_program_trained_on_a_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    model = train(tmp_path, config(**on_ranks(1), device="cuda", max_epochs=1))
    program = torch.export.load(ArtifactStore(tmp_path / "store").path(model.program)).module()
    assert program(torch.zeros(3, 3, dtype=torch.int32), torch.zeros(3, 5)).device.type == "cpu"
