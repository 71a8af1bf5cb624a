from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.ranks.rank_programs import run_on_ranks
from tests.support.ranks.strategy_cases import CASES, plain_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device"),
]

EXACT = ("horovod", "ddp", "fsdp")
NAMES = (*EXACT, *(f"{name}, {precision}" for name in EXACT for precision in ("bf16", "fp16")))


def test_every_strategy_has_the_losses_of_one_plain_process_on_cpu(tmp_path: Path) -> None:
    """With one device its exchange is NCCL's all the same; sixteen bits are run on two."""
    size = min(2, torch.cuda.device_count())
    run_on_ranks("tests.support.ranks.strategy_ranks", tmp_path, size, "cuda", *NAMES)
    for rank in range(size):
        seen = json.loads((tmp_path / f"seen-{rank}-of-{size}.json").read_text())
        for name in NAMES:
            case = CASES[name]
            if size in case.sizes:
                tolerance = max(case.loss_tolerance, 1e-3)
                np.testing.assert_allclose(
                    seen[name]["curve"], plain_run(case).curve, rtol=tolerance
                )
