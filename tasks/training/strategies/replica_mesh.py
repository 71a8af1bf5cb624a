"""Ranks as a grid: rows are replicas of the network, columns the parts that one is cut into."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Exchange


class ReplicaMesh:
    """Who shares a replica with this rank, and who holds the same part of the others.

    Ranks that follow each other share a replica, so that on several hosts the parts of one, which
    talk the most, are close. All methods are collective over the groups that they name.

    Args:
        exchange: all ranks, on torch.distributed.
        num_parts: ranks that share a replica.
        field: the configuration's field that says so.
        device: where tensors are.

    Raises:
        ConfigurationError: the ranks cannot be divided so.
    """

    def __init__(
        self,
        exchange: Exchange,
        num_parts: int,
        field: Literal["tensor_parallel_size", "pipeline_stages"],
        device: torch.device,
    ) -> None:
        if exchange.name != "torch":
            raise ConfigurationError(
                f"{field}={num_parts} needs torch.distributed, but ranks talk by {exchange.name}; "
                "launch them for the strategy that is asked for"
            )
        if exchange.size % num_parts:
            raise ConfigurationError(
                f"{exchange.size} rank(s) do not divide into replicas of {field}={num_parts}; "
                f"start a multiple of {num_parts} ranks"
            )
        self._mesh = init_device_mesh(
            device.type,
            (exchange.size // num_parts, num_parts),
            mesh_dim_names=("replica", "part"),
        )
        self.num_parts = num_parts
        self.num_replicas = exchange.size // num_parts
        self.replica, self.part = divmod(exchange.rank, num_parts)
        self.parts: dist.ProcessGroup = self._mesh.get_group("part")
        self._replicas: dist.ProcessGroup = self._mesh.get_group("replica")

    @property
    def of_replica(self) -> DeviceMesh:
        """The ranks of this rank's replica, as torch's tensor parallelism takes them."""
        return self._mesh["part"]

    def sum_over_replicas_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks that hold the same part."""
        dist.all_reduce(tensor, group=self._replicas)

    def sum_over_parts_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks of this replica."""
        dist.all_reduce(tensor, group=self.parts)

    def broadcast_from_part_(self, tensor: Tensor, part: int) -> None:
        """Replace `tensor` on the ranks of this replica by that of one of them."""
        dist.broadcast(tensor, group=self.parts, group_src=part)

    def gather_parts(self, tensor: Tensor) -> list[Tensor]:
        """The equally large tensors of all ranks of this replica."""
        gathered = [torch.empty_like(tensor) for _ in range(self.num_parts)]
        dist.all_gather(gathered, tensor, group=self.parts)
        return gathered

    def share_generator(self) -> None:
        """Set the CPU's and this GPU's random generator to those of the replica's first rank."""
        state = torch.get_rng_state()
        self.broadcast_from_part_(state, 0)
        torch.set_rng_state(state)
        if torch.cuda.is_available() and self._mesh.device_type == "cuda":
            state = torch.cuda.get_rng_state()  # bytes on the CPU
            self.broadcast_from_part_(state, 0)
            torch.cuda.set_rng_state(state)
