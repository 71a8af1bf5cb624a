"""The tabular network with layers of Keras, trained by the same ranks and strategies.

Keras runs on its PyTorch backend, where a layer is a `torch.nn.Module`: its weights are exchanged,
kept in checkpoints and exported like those of any other network of the project.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tasks.kernel.errors import ConfigurationError
from tasks.training.config import KERAS_IS_MISSING
from tasks.training.core.network import NumberEncoding, embedded, embedding_size
from tasks.training.data.preprocess import Preprocessing

if TYPE_CHECKING:
    from types import ModuleType

    from tasks.training.config import TrainingConfig

BACKEND = "torch"


def load_keras() -> ModuleType:
    """Import Keras on its PyTorch backend, which it chooses for good while it is imported.

    Raises:
        ConfigurationError: it is not installed, or something imported it on another backend.
    """
    os.environ["KERAS_BACKEND"] = BACKEND
    try:
        import keras
    except ImportError as exc:
        raise ConfigurationError(KERAS_IS_MISSING) from exc
    found = keras.backend.backend()
    if found != BACKEND:
        raise ConfigurationError(
            f"Keras runs on backend {found!r} in this process, expected {BACKEND!r}: it was "
            "imported before the training was. Start the training in a process of its own"
        )
    module: ModuleType = keras
    return module


class KerasNetwork(nn.Module):
    """Embeddings and dense layers of Keras; the same shape and interface as `TabularNetwork`.

    Dropout is PyTorch's: what is dropped must be a function of the seed and the step, and Keras
    keeps the state of its generator for itself.
    """

    unknown: Tensor

    def __init__(self, preprocessing: Preprocessing, config: TrainingConfig) -> None:
        super().__init__()
        keras = load_keras()
        self._made_from = preprocessing, config
        self.numbers = NumberEncoding(preprocessing)
        self.category_dropout = config.category_dropout
        sizes = [len(vocabulary) + 1 for vocabulary in preprocessing.vocabularies]
        self.register_buffer("unknown", torch.tensor([size - 1 for size in sizes]))
        widths = [embedding_size(size, config) for size in sizes]
        # Keras numbers the layers of a process; given names are the same on every rank.
        self.embeddings = nn.ModuleList(
            _built(
                keras.layers.Embedding(
                    size,
                    width,
                    embeddings_initializer=keras.initializers.RandomNormal(
                        stddev=0.1, seed=config.seed + column
                    ),
                    name=f"category_{column}",
                ),
                (None,),
            )
            for column, (size, width) in enumerate(zip(sizes, widths, strict=True))
        )
        self.perceptron = _perceptron(keras, sum(widths) + self.numbers.num_outputs, config)

    def __deepcopy__(self, memo: dict[int, object]) -> KerasNetwork:
        """An equal network; Keras itself would copy a layer by saving it to a file in memory."""
        copied = KerasNetwork(*self._made_from)
        copied.load_state_dict(self.state_dict())
        return copied.train(self.training)

    @property
    def tables(self) -> list[Tensor]:
        """Table of each category column, its last row for everything unknown."""
        layers: list[Any] = list(self.embeddings)
        return [layer.embeddings.value for layer in layers]

    def forward(self, positions: Tensor, numeric: Tensor) -> Tensor:
        """Logits, shape (rows,); arguments as `TabularNetwork.forward`."""
        inputs = embedded(self, positions, numeric)
        logits: Tensor = self.perceptron(inputs).squeeze(1)
        return logits


def _perceptron(keras: ModuleType, inputs: int, config: TrainingConfig) -> nn.Sequential:
    layers: list[nn.Module] = []
    for position, size in enumerate((*config.hidden_sizes, 1)):
        is_last = position == len(config.hidden_sizes)
        dense = keras.layers.Dense(
            size,
            activation=None if is_last else "relu",
            kernel_initializer=keras.initializers.HeUniform(seed=config.seed + 1000 + position),
            name=f"dense_{position}",
        )
        layers.append(_built(dense, (None, inputs)))
        if not is_last:
            layers.append(nn.Dropout(config.dropout))
        inputs = size
    return nn.Sequential(*layers)


def _built(layer: Any, shape: tuple[int | None, ...]) -> nn.Module:
    """The layer with its weights made, on the CPU."""
    with load_keras().device("cpu"):
        layer.build(shape)
    module: nn.Module = layer
    return module
