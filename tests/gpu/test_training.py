from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.runs import config, losses, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device"),
]


def test_training_on_a_gpu_matches_the_cpus_loss(tmp_path: Path) -> None:
    on_cpu = train(tmp_path / "cpu", config(num_ranks=1))
    on_gpu = train(tmp_path / "gpu", config(num_ranks=1, device="cuda"))
    np.testing.assert_allclose(losses(on_gpu.epochs), losses(on_cpu.epochs), atol=1e-3)


def test_a_program_trained_on_a_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    from tasks.settings import ArtifactStore

    model = train(tmp_path, config(num_ranks=1, device="cuda", max_epochs=1))
    program = torch.export.load(ArtifactStore(tmp_path / "store").path(model.program)).module()
    assert program(torch.zeros(3, 3, dtype=torch.int32), torch.zeros(3, 5)).device.type == "cpu"
