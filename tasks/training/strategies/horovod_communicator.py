"""What the ranks say to each other: the few collectives of training, on Horovod.

Training code sees only this class, so that another engine can take Horovod's place. Nothing that is
exchanged is pickled: numbers travel as tensors, small values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.training.data.preprocess import Float32Array

# Horovod sends neither; their bits travel as integers of the same size.
SENT_AS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16}


class HorovodExchange:
    """Collectives of one rank; every rank must call each method, in the same order.

    Rank and size are asked of Horovod each time: an elastic job changes them.

    Args:
        members: a process set that the exchange is confined to; none: all ranks of the job.
    """

    name = "horovod"

    def __init__(self, members: Any = None) -> None:
        if members is None:
            hvd.init()
        self._members = hvd.global_process_set if members is None else members
        self.exchanges_on_gpu = bool(hvd.nccl_built())

    @property
    def rank(self) -> int:
        """This rank's number among the members, from 0."""
        return int(self._members.rank())

    @property
    def size(self) -> int:
        """Number of members."""
        return int(self._members.size())

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return int(hvd.local_rank())

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return int(hvd.local_size())

    def group(self, ranks: Sequence[int]) -> HorovodExchange | None:
        """An exchange among some ranks; None on the others. Every rank of the job must call it.

        Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment.
        """
        members = hvd.add_process_set(list(ranks))
        return HorovodExchange(members) if members.included() else None

    def shut_down(self) -> None:
        """Leave the job in good order; to be called once, after the last collective."""
        if self._members is hvd.global_process_set:
            hvd.shutdown()

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        self.begin_sum_(tensor, "sum")()

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """Start to replace `tensor` by its sum over all ranks; what is returned waits for it.

        A GPU tensor goes through host memory where Horovod was built without NCCL.

        Args:
            tensor: contiguous; not to be touched before the wait is over.
            name: equal on all ranks, and no other exchange of that name is under way.
        """
        if tensor.is_cuda and not self.exchanges_on_gpu:
            on_host = tensor.cpu()
        else:
            on_host = tensor
        handle = self._begin(on_host, name)

        def wait() -> None:
            hvd.synchronize(handle)
            if on_host is not tensor:
                tensor.copy_(on_host)

        return wait

    def _begin(self, tensor: Tensor, name: str) -> Any:
        # Always named: the names that Horovod makes up count a rank's calls, so its response cache
        # never sees one again, and a rank that joins an elastic job counts from 0.
        return hvd.allreduce_async_(
            tensor,
            op=hvd.Sum,
            name=f"{name}.{tensor.dtype}.{tensor.numel()}",
            process_set=self._members,
        )

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Elementwise sum of float64 `values` over all ranks."""
        total = torch.from_numpy(values.copy())
        self.begin_sum_(total, "sum of values")()
        return total.numpy()

    def minimum(self, value: int) -> int:
        """Smallest `value` of all ranks."""
        smallest = hvd.allreduce_(
            torch.tensor([value]), op=hvd.Min, name="minimum", process_set=self._members
        )
        return int(smallest.item())

    def from_rank_0(self, value: int) -> int:
        """The `value` of rank 0."""
        shared = torch.tensor([value])
        self.broadcast_([shared])
        return int(shared.item())

    def gather_rows(self, rows: Float32Array) -> Float32Array:
        """All ranks' float32 `rows` (equal columns), one rank's after the other's."""
        return self._gather(torch.from_numpy(rows), "rows").numpy()

    def gather_values(self, value: object) -> list[object]:
        """The JSON-serializable `value` of every rank, in rank order."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([len(text)]), "lengths").tolist()
        joined: bytes = self._gather(text, "texts").numpy().tobytes()
        ends = np.cumsum(lengths)
        return [
            json.loads(joined[end - length : end])
            for end, length in zip(ends, lengths, strict=True)
        ]

    def _gather(self, rows: Tensor, name: str) -> Tensor:
        gathered: Tensor = hvd.allgather(
            rows, name=f"{name}.{rows.dtype}", process_set=self._members
        )
        return gathered

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by rank 0's."""
        # Horovod names the source by its number in the whole job, also in a process set.
        root = 0 if self._members is hvd.global_process_set else self._members.ranks[0]
        handles = []
        for number, tensor in enumerate(tensors):
            sent = tensor.detach().cpu().contiguous()
            sent = sent.view(SENT_AS.get(sent.dtype, sent.dtype))
            name = f"broadcast.{number}.{sent.dtype}.{sent.numel()}"
            handles.append(
                (tensor, hvd.broadcast_async_(sent, root, name=name, process_set=self._members))
            )
        for tensor, handle in handles:
            received = hvd.synchronize(handle).view(tensor.dtype)
            with torch.no_grad():
                tensor.copy_(received.view_as(tensor))
