"""Sparse gradients: each rank sends its largest values alone, and keeps the others for later.

After Lin et al., "Deep Gradient Compression" (2018), and Stich, Cordonnier and Jaggi, "Sparsified
SGD with Memory" (2018).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tasks.training.strategies.flat_gradients import FlatGradients
from tasks.training.strategies.gradient_compression import ErrorFeedback


class TopKSum(ErrorFeedback):
    """Sends the values of largest magnitude with their positions, 8 bytes each, by allgather.

    An allgather's bytes grow with the number of ranks n, where those of a sum hardly do: against a
    plain sum they are n times the share of values that are sent.
    """

    def _compressed_sum(self, owed: FlatGradients) -> tuple[Tensor, Tensor, int]:
        flat = owed.flat
        count = math.ceil(self._config.topk_share * flat.numel())
        # What is no number counts as largest, so it is sent and seen by all ranks.
        positions = torch.topk(flat.abs(), count, sorted=False).indices
        values = flat[positions]
        sent = torch.zeros_like(flat).index_copy_(0, positions, values)
        total = torch.zeros_like(flat)
        # Rank after rank, the same order on all of them: the sums are equal to the last bit.
        for of_rank, value_of_rank in self._gather(positions, values):
            total.index_add_(0, of_rank, value_of_rank)
        return total, sent, 8 * count * (self._exchange.size - 1)

    def _gather(self, positions: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Positions and values of every rank."""
        # Positions travel as the bits of float32 numbers: an allgather does no arithmetic.
        bits = positions.to(torch.int32).view(torch.float32)
        rows = torch.stack([bits, values], dim=1).cpu()
        gathered = torch.from_numpy(self._exchange.gather_rows(rows.numpy())).to(values.device)
        return [
            (part[:, 0].contiguous().view(torch.int32).long(), part[:, 1])
            for part in gathered.view(self._exchange.size, len(values), 2)
        ]
