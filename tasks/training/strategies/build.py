"""From the configuration to the rank's exchange and strategy."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

import torch
from torch import nn

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Exchange, OptimizerBuilder, RowLosses, Strategy
from tasks.training.strategies.config import StrategyConfig

# Where each strategy is, by name: imported when it is chosen, since each brings in libraries of its
# own. All are built with the arguments of `DataParallel`.
STRATEGIES = {
    "horovod": "tasks.training.strategies.horovod:HorovodStrategy",
    "ddp": "tasks.training.strategies.ddp:DdpStrategy",
    "fsdp": "tasks.training.strategies.sharded:FsdpStrategy",
    "tensor-parallel": "tasks.training.strategies.tensor_parallel:TensorParallel",
    "pipeline-parallel": "tasks.training.strategies.pipeline_parallel:PipelineParallel",
    "local-sgd": "tasks.training.strategies.local_sgd:LocalSgd",
    "asynchronous": "tasks.training.strategies.asynchronous:AsynchronousSgd",
}


def join(config: StrategyConfig, device: str) -> Exchange:
    """Meet the other ranks that the environment names; every rank calls it once.

    Reads HOROVOD_* or, on torch.distributed, the variables of `torch_environment`.

    Args:
        config: says by which library ranks talk.
        device: `cpu` or `cuda`, where the tensors that are exchanged live.

    Raises:
        ConfigurationError: the environment does not say who the rank is.
        TransientError: the other ranks did not come.
    """
    if config.engine == "horovod":
        if "HOROVOD_HOSTNAME" not in os.environ:  # then Horovod would train alone, and not say so
            raise ConfigurationError(
                "a rank on Horovod needs HOROVOD_HOSTNAME, HOROVOD_RANK and the like in its "
                "environment; seen: none. Start it through the launcher or horovodrun"
            )
        from tasks.training.strategies.horovod_communicator import HorovodExchange

        return HorovodExchange()
    from tasks.training.strategies.torch_communicator import TorchExchange

    return TorchExchange.join(os.environ, device)


def build_strategy(
    config: StrategyConfig,
    exchange: Exchange,
    network: nn.Module,
    row_losses: RowLosses,
    build_optimizer: OptimizerBuilder,
    device: torch.device,
) -> Strategy:
    """The strategy that `config` asks for. Collective: ends with rank 0's parameters on all ranks.

    Args:
        config: what is asked for.
        exchange: from `join`.
        network: on the CPU; from now on the strategy's.
        row_losses: (outputs, labels) to the loss of each row.
        build_optimizer: called once, with the parameters that this rank steps.
        device: where the network is put.
    """
    module, _, name = STRATEGIES[strategy_kind(config)].partition(":")
    kind: Callable[..., Strategy] = getattr(importlib.import_module(module), name)
    return kind(config, exchange, network, row_losses, build_optimizer, device)


def strategy_kind(config: StrategyConfig) -> str:
    """The key in `STRATEGIES`: how a rank steps comes before by which library it talks.

    Compressed gradients lie in the flat buffer of the `horovod` strategy, which takes any exchange.
    """
    if config.gradient_compression != "none":
        return "horovod"
    if config.asynchronous:
        return "asynchronous"
    if config.local_steps > 1:
        return "local-sgd"
    # Compression needs all gradients in one buffer, which DDP does not have.
    return "horovod" if config.gradient_compression != "none" else config.name
