"""The collectives of training on Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import horovod.torch as hvd
import torch
from torch import Tensor

from tasks.training.strategies.base import Communicator

# Horovod sends neither; their bits travel as integers of the same size.
SENT_AS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16}


class HorovodCommunicator(Communicator):
    """See `Communicator`. An elastic job makes a new one for each group of ranks.

    Operations always have a name: the names that Horovod makes up count a rank's calls, so its
    response cache never meets one again, and a rank that joins an elastic job counts from 0.
    """

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.local_rank, self.local_size = int(hvd.local_rank()), int(hvd.local_size())

    def shut_down(self) -> None:
        """See `Communicator`."""
        hvd.shutdown()

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """See `Communicator`; through host memory where Horovod was built without NCCL."""
        on_host = tensor.cpu() if tensor.is_cuda and not hvd.nccl_built() else tensor
        full_name = f"{name}.{tensor.dtype}.{tensor.numel()}"
        handle = hvd.allreduce_async_(on_host, op=hvd.Sum, name=full_name)

        def wait() -> None:
            hvd.synchronize(handle)
            if on_host is not tensor:
                tensor.copy_(on_host)

        return wait

    def gather(self, rows: Tensor) -> list[Tensor]:
        """See `Communicator`."""
        lengths = hvd.allgather(torch.tensor([len(rows)]), name="lengths").tolist()
        return list(hvd.allgather(rows, name=f"rows.{rows.dtype}").split(lengths))

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """See `Communicator`."""
        handles = []
        for number, tensor in enumerate(tensors):
            sent = tensor.detach().cpu().contiguous()
            sent = sent.view(SENT_AS.get(sent.dtype, sent.dtype))
            name = f"broadcast.{number}.{sent.dtype}.{sent.numel()}"
            handles.append((tensor, hvd.broadcast_async_(sent, 0, name=name)))
        for tensor, handle in handles:
            received = hvd.synchronize(handle).view(tensor.dtype)
            with torch.no_grad():
                tensor.copy_(received.view_as(tensor))
