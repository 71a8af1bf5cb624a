from __future__ import annotations

import pytest
import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError

from tasks.training.launch.worker import is_loss_of_another_rank

GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


@pytest.mark.parametrize(
    "error",
    [HorovodInternalError("shut down"), dist.DistNetworkError("gone"), RuntimeError(GLOO)],
)
def test_an_exchange_that_broke_is_laid_to_another_rank(error: Exception) -> None:
    assert is_loss_of_another_rank(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError(GLOO), MemoryError(), KeyError("x")]
)
def test_a_ranks_own_error_is_its_own(error: Exception) -> None:
    assert not is_loss_of_another_rank(error)
