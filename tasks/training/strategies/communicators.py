"""The collectives of training: on Horovod, and on torch.distributed (Gloo on CPUs, NCCL on GPUs).

On torch a rank reads torchrun's environment variables, so that ranks may also be started by it. On
one host they meet through a file: torch's own TCP store would listen on every interface.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor

from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.training.strategies.base import Communicator
from tasks.training.strategies.config import STORE_FILE, TIMEOUT, StrategyConfig

DEFAULT_TIMEOUT_S = 120
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


class TorchCommunicator(Communicator):
    """See `Communicator`; made where the other ranks are met that the environment names.

    Raises:
        ConfigurationError: a variable is absent or no number.
        TransientError: the other ranks did not come in time.
    """

    def __init__(self, variables: Mapping[str, str], device: str) -> None:
        try:
            self.rank, self.size, self.local_rank, self.local_size = (
                int(variables[name])
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            )
            timeout_s = int(variables.get(TIMEOUT, DEFAULT_TIMEOUT_S))
            meeting_point = _meeting_point(variables)
        except (KeyError, ValueError) as exc:
            raise ConfigurationError(
                f"a rank on torch.distributed needs RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE "
                f"and {STORE_FILE} (or MASTER_ADDR and MASTER_PORT) in its environment, as numbers "
                f"where they are numbers; seen: {exc!r}. Start it through the launcher or torchrun"
            ) from exc
        try:
            dist.init_process_group(
                # Small values go through host memory on GPUs too.
                backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                init_method=meeting_point,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (dist.DistError, RuntimeError) as exc:
            raise TransientError(
                f"rank {self.rank} of {self.size} did not meet the others at {meeting_point} "
                f"within {timeout_s} s: {exc}"
            ) from exc

    def shut_down(self) -> None:
        """See `Communicator`."""
        # A rank that leaves while another still reads its last message would break that one.
        dist.barrier()
        dist.destroy_process_group()

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """See `Communicator`; sums meet in the order in which they are begun, whatever `name`."""
        work = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def gather(self, rows: Tensor) -> list[Tensor]:
        """See `Communicator`; as long as the longest on the way, since Gloo wants equal sizes."""
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)]))
        lengths = [int(count.item()) for count in counts]
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """See `Communicator`."""
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=0)
            with torch.no_grad():
                tensor.copy_(sent)


def _meeting_point(variables: Mapping[str, str]) -> str:
    if STORE_FILE in variables:
        return Path(variables[STORE_FILE]).as_uri()
    return f"tcp://{variables['MASTER_ADDR']}:{int(variables['MASTER_PORT'])}"


def join(config: StrategyConfig, device: str) -> Communicator:
    """Meet the other ranks that the environment names; every rank calls it once.

    Args:
        config: names the library that carries the collectives.
        device: `cpu` or `cuda`, where the tensors that travel live.

    Raises:
        ConfigurationError: the environment does not name the rank.
        TransientError: the other ranks did not come.
    """
    if config.engine == "horovod":
        if "HOROVOD_HOSTNAME" not in os.environ:  # then Horovod would train alone, unnoticed
            raise ConfigurationError(
                "a rank on Horovod needs HOROVOD_HOSTNAME, HOROVOD_RANK and the like in its "
                "environment; seen: none. Start it through the launcher or horovodrun"
            )
        return HorovodCommunicator()
    return TorchCommunicator(os.environ, device)
