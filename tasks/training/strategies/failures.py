"""Telling a rank's own error from what another rank's end does to it."""

from __future__ import annotations

import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError

# Gloo's errors come as plain RuntimeErrors that begin with the place in its source.
GLOO_SOURCE = "/gloo/"


def is_loss_of_another_rank(error: BaseException) -> bool:
    """True where an exchange broke because another rank has gone, so that the cause is there."""
    if isinstance(error, HorovodInternalError | dist.DistError):
        return True
    return type(error) is RuntimeError and GLOO_SOURCE in str(error)
