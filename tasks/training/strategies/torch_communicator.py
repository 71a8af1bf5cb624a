"""The collectives of training on torch.distributed: Gloo on CPUs, NCCL between GPUs.

A rank reads torchrun's environment variables, so that ranks may also be started by it. On one host
the ranks meet through a file: torch's own TCP store would listen on every interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.training.strategies.base import Communicator

LOOPBACK_INTERFACE = "lo"
STORE_FILE = "TORCH_STORE_FILE"
TIMEOUT = "TORCH_EXCHANGE_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 120


def local_torch_variables(
    rank: int, num_ranks: int, store_file: Path, timeout_s: int = DEFAULT_TIMEOUT_S
) -> dict[str, str]:
    """Environment of one rank of a single host: its numbers, and where the ranks meet.

    Args:
        rank: number of the rank.
        num_ranks: ranks of the job, all on this host.
        store_file: absent; a new name for each attempt, the same for all its ranks. To be removed
            by the caller after the attempt.
        timeout_s: how long a rank waits for another in one collective before it gives up.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_FILE: str(store_file),
        TIMEOUT: str(timeout_s),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }


class TorchCommunicator(Communicator):
    """See `Communicator`."""

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size

    @classmethod
    def join(cls, variables: Mapping[str, str], device: str) -> TorchCommunicator:
        """Meet the other ranks that the environment names.

        Raises:
            ConfigurationError: a variable is absent or no number.
            TransientError: the other ranks did not come in time.
        """
        try:
            rank, size, *local = (
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
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (dist.DistError, RuntimeError) as exc:
            raise TransientError(
                f"rank {rank} of {size} did not meet the others at {meeting_point} within "
                f"{timeout_s} s: {exc}"
            ) from exc
        return cls(rank, size, *local)

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
