"""What the ranks say to each other, on torch.distributed: Gloo on CPUs, NCCL between GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tasks.kernel.errors import TransientError
from tasks.training.data.preprocess import Float32Array
from tasks.training.strategies.torch_environment import TorchEnvironment


class TorchExchange:
    """Collectives of one rank; every rank must call each method, in the same order.

    Args:
        environment: who the rank is.
        members: the process group that the exchange is confined to; None: all ranks of the job.
    """

    name = "torch"

    def __init__(
        self, environment: TorchEnvironment, members: dist.ProcessGroup | None = None
    ) -> None:
        self._environment = environment
        self._members = members

    @classmethod
    def join(cls, variables: Mapping[str, str], device: str) -> TorchExchange:
        """Meet the other ranks that the environment names.

        Raises:
            ConfigurationError: the environment does not say who the rank is.
            TransientError: the other ranks did not come in time.
        """
        environment = TorchEnvironment.of(variables)
        try:
            dist.init_process_group(
                # Small values go through host memory on GPUs too.
                backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                init_method=environment.meeting_point,
                rank=environment.rank,
                world_size=environment.size,
                timeout=timedelta(seconds=environment.timeout_s),
            )
        except (dist.DistError, RuntimeError) as exc:
            raise TransientError(
                f"rank {environment.rank} of {environment.size} did not meet the others at "
                f"{environment.meeting_point} within {environment.timeout_s} s: {exc}"
            ) from exc
        return cls(environment)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """For what is built on torch.distributed itself; None: all ranks."""
        return self._members

    @property
    def rank(self) -> int:
        """This rank's number among the members, from 0."""
        return dist.get_rank(self._members)

    @property
    def size(self) -> int:
        """Number of members."""
        return dist.get_world_size(self._members)

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self._environment.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self._environment.local_size

    def group(self, ranks: Sequence[int]) -> TorchExchange | None:
        """An exchange among some ranks; None on the others. Every rank of the job must call it."""
        members = dist.new_group(list(ranks))
        return TorchExchange(self._environment, members) if dist.get_rank() in ranks else None

    def shut_down(self) -> None:
        """Leave the job in good order; to be called once, after the last collective."""
        if self._members is None:
            # A rank that leaves while another still reads its last message would break that one.
            dist.barrier()
            dist.destroy_process_group()

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        dist.all_reduce(tensor, group=self._members)

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """Start to replace `tensor` by its sum over all ranks; what is returned waits for it.

        Args:
            tensor: contiguous; not to be touched before the wait is over.
            name: says nothing here: exchanges meet in the order in which they are begun.
        """
        work = dist.all_reduce(tensor, group=self._members, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Elementwise sum of float64 `values` over all ranks."""
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total, group=self._members)
        return total.numpy()

    def minimum(self, value: int) -> int:
        """Smallest `value` of all ranks."""
        smallest = torch.tensor([value])
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._members)
        return int(smallest.item())

    def from_rank_0(self, value: int) -> int:
        """The `value` of rank 0."""
        shared = torch.tensor([value])
        self.broadcast_([shared])
        return int(shared.item())

    def gather_rows(self, rows: Float32Array) -> Float32Array:
        """All ranks' float32 `rows` (equal columns), one rank's after the other's."""
        return torch.cat(self._gather(torch.from_numpy(rows))).numpy()

    def gather_values(self, value: object) -> list[object]:
        """The JSON-serializable `value` of every rank, in rank order."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self._gather(text)]

    def _gather(self, rows: Tensor) -> list[Tensor]:
        """Each rank's rows; as long as the longest on the way, since Gloo wants equal sizes."""
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)]), group=self._members)
        lengths = [int(count.item()) for count in counts]
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=self._members)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by rank 0's."""
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, group=self._members, group_src=0)
            with torch.no_grad():
                tensor.copy_(sent)
