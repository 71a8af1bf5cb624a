"""Which strategy and which communicator a configuration names, loaded when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from tasks.training.strategies.base import Communicator, OptimizerBuilder, RowLosses
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import Strategy

STRATEGIES = {
    "horovod": "tasks.training.strategies.data_parallel:HorovodStrategy",
    "ddp": "tasks.training.strategies.data_parallel:DdpStrategy",
    "fsdp": "tasks.training.strategies.sharded:FsdpStrategy",
    "local-sgd": "tasks.training.strategies.local_sgd:LocalSgd",
    "asynchronous": "tasks.training.strategies.local_sgd:AsynchronousSgd",
}


def build_strategy(
    config: StrategyConfig,
    ranks: Communicator,
    network: nn.Module,
    row_losses: RowLosses,
    build_optimizer: OptimizerBuilder,
    device: torch.device,
) -> Strategy:
    """The strategy of a configuration. Collective: ends with rank 0's parameters on all ranks.

    Args:
        config: names it.
        ranks: from `join`.
        network: on the CPU; from now on the strategy's.
        row_losses: (outputs, labels) to the loss of each row.
        build_optimizer: called once, with the parameters that this rank steps.
        device: where the network is put.
    """
    module, _, name = STRATEGIES[strategy_kind(config)].partition(":")
    kind: Callable[..., Strategy] = getattr(importlib.import_module(module), name)
    return kind(config, ranks, network, row_losses, build_optimizer, device)


def strategy_kind(config: StrategyConfig) -> str:
    """The key in `STRATEGIES`: how a rank steps comes before which library carries its sums."""
    if config.asynchronous:
        return "asynchronous"
    if config.local_steps > 1:
        return "local-sgd"
    # Compression needs all gradients in one buffer, which DDP does not have.
    return "horovod" if config.gradient_compression != "none" else config.name
