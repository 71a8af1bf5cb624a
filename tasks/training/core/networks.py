"""The networks that can be trained, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.data.preprocess import Preprocessing

NetworkBuilder = Callable[[Preprocessing, TrainingConfig], nn.Module]


def build_network(preprocessing: Preprocessing, config: TrainingConfig) -> TabularNetwork:
    """A new network of the kind that `config.network` names; all kinds have one interface.

    Raises:
        ConfigurationError: `keras` is asked for where it is not installed.
    """
    if config.network == "torch":
        return TabularNetwork(preprocessing, config)
    from tasks.training.core.keras_network import KerasNetwork  # an optional extra

    keras: NetworkBuilder = KerasNetwork
    network: TabularNetwork = keras(preprocessing, config)  # type: ignore[assignment]
    return network
