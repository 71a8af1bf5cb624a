"""What the ranks say to each other: the few collectives of training, on Horovod.

Training code sees only this class, so that another engine can take Horovod's place. Nothing that is
exchanged is pickled: numbers travel as tensors, small values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.training.data.preprocess import Float32Array


class HorovodExchange:
    """Collectives of one rank; every rank must call each method, in the same order."""

    name = "horovod"

    def __init__(self) -> None:
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.exchanges_on_gpu = bool(hvd.nccl_built())

    def shut_down(self) -> None:
        """Leave the job in good order; to be called once, after the last collective."""
        hvd.shutdown()

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` by its mean over all ranks.

        A GPU tensor goes through host memory where Horovod was built without NCCL.
        """
        if tensor.is_cuda and not self.exchanges_on_gpu:
            on_host = tensor.cpu()
            hvd.allreduce_(on_host, op=hvd.Average)
            tensor.copy_(on_host)
        else:
            hvd.allreduce_(tensor, op=hvd.Average)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Elementwise sum of float64 `values` over all ranks."""
        total: Tensor = hvd.allreduce(torch.from_numpy(values), op=hvd.Sum)
        return total.numpy()

    def minimum(self, value: int) -> int:
        """Smallest `value` of all ranks."""
        return int(hvd.allreduce(torch.tensor([value]), op=hvd.Min).item())

    def from_rank_0(self, value: int) -> int:
        """The `value` of rank 0."""
        return int(hvd.broadcast(torch.tensor([value]), root_rank=0).item())

    def gather_rows(self, rows: Float32Array) -> Float32Array:
        """All ranks' float32 `rows` (equal columns), one rank's after the other's."""
        gathered: Tensor = hvd.allgather(torch.from_numpy(rows))
        return gathered.numpy()

    def gather_values(self, value: object) -> list[object]:
        """The JSON-serializable `value` of every rank, in rank order."""
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy()
        lengths = hvd.allgather(torch.tensor([len(text)])).tolist()
        joined: bytes = hvd.allgather(torch.from_numpy(text)).numpy().tobytes()
        ends = np.cumsum(lengths)
        return [
            json.loads(joined[end - length : end])
            for end, length in zip(ends, lengths, strict=True)
        ]

    def broadcast_parameters(self, network: nn.Module) -> None:
        """Give every rank the parameters of rank 0; `network` is still on the CPU."""
        hvd.broadcast_parameters(dict(network.named_parameters()), root_rank=0)


class FlatGradients:
    """Gradients of all parameters as views of one tensor, exchanged in one allreduce a step.

    As fast on Gloo as Horovod's wrapped optimizer, and the optimizer stays a plain one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = list(parameters)
        self._flat = torch.zeros(sum(p.numel() for p in trained), device=trained[0].device)
        start = 0
        for parameter in trained:
            end = start + parameter.numel()
            parameter.grad = self._flat[start:end].view_as(parameter)
            start = end

    def clear(self) -> None:
        """Set all gradients to zero."""
        self._flat.zero_()

    def average(self, exchange: HorovodExchange) -> None:
        """Replace all gradients by their mean over the ranks."""
        exchange.average(self._flat)
