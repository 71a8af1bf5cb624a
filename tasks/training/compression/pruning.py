"""Taking whole units out of a trained perceptron, so that what is left is a smaller, dense one.

Structured pruning as of Fang et al., "DepGraph: Towards Any Structural Pruning" (2023), by their
library: a unit's importance is the Euclidean norm of all weights that go with it, those into it and
those out of it. Without further training a network that lost much of itself is of little use; what
is made here is what a training begins with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tasks.contracts.base import Artifact
from tasks.contracts.release import CompressionParent
from tasks.contracts.training import StartingPoint
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.training.checkpoints.state import serialized

PREFIX = "perceptron."
CHECKPOINT = "pruned.pt"


def pruned_start(parent: CompressionParent, share: float, store: ArtifactStore) -> StartingPoint:
    """The parent's weights without the least important units, for a training to begin with.

    Args:
        parent: whose network is pruned; it stays as it is.
        share: of the units of each hidden layer that go.
        store: holds the parent's checkpoint and takes the pruned one, under a key of its content.

    Raises:
        ConfigurationError: the network is of another framework, or a layer would be left empty.
        ArtifactError: the checkpoint is absent or damaged.
        StorageError: the disk refused the write.
    """
    key = content_key("pruned", parent.checkpoint.sha256, share, code_digest(__file__))

    def build(folder: StagedFolder) -> StartingPoint:
        checkpoint = read_checkpoint(parent.checkpoint, store)
        network = pruned_weights(checkpoint["network"], share)
        write_atomically(folder.path / CHECKPOINT, serialized({**checkpoint, "network": network}))
        return StartingPoint(
            version=parent.program.version,
            checkpoint=folder.artifact(CHECKPOINT),
            columns=parent.program.raw_columns,
            trained_on=parent.splits.train,
        )

    return store.build_once("pruned", key, StartingPoint, build)


def read_checkpoint(artifact: Artifact, store: ArtifactStore) -> dict[str, dict[str, Tensor]]:
    """The best epoch of a training, as `best.pt` holds it; nothing is unpickled.

    Raises:
        ArtifactError: it is absent, damaged, or holds no network.
    """
    checkpoint = torch.load(store.path(artifact), map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "network" not in checkpoint:
        raise ArtifactError(
            f"{artifact.uri} holds no network; expected a checkpoint as training writes it. Train "
            "the version again"
        )
    return checkpoint


def hidden_sizes_of(network: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Units of each hidden layer of a network's state.

    Raises:
        ConfigurationError: it is of another framework.
    """
    return tuple(len(network[f"{PREFIX}{n}.bias"]) for n in _layers(network)[:-1])


def num_parameters_of(network: Mapping[str, Tensor]) -> int:
    """Trained numbers of a network's state: embeddings and perceptron, not what was fitted."""
    fitted = ("numbers.", "unknown")
    return sum(value.numel() for name, value in network.items() if not name.startswith(fitted))


def pruned_weights(network: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """The state of a network without the least important units of each hidden layer.

    Args:
        network: names to tensors; embeddings and buffers stay as they are.
        share: of the units of each hidden layer that go, rounded up.

    Raises:
        ConfigurationError: a layer would be left empty, or the network is of another framework.
    """
    perceptron = _perceptron(network)
    prune(perceptron, share)
    kept = {name: value for name, value in network.items() if not name.startswith(PREFIX)}
    left = {PREFIX + name: value.clone() for name, value in perceptron.state_dict().items()}
    return {**kept, **left}


def prune(perceptron: nn.Sequential, share: float) -> None:
    """Take the least important units out of each hidden layer, in place.

    Args:
        perceptron: layers one after the other; what the first takes and the last gives is left.
        share: of the units of each hidden layer that go, rounded up.

    Raises:
        ConfigurationError: a layer would be left empty.
    """
    import torch_pruning

    linear = [layer for layer in perceptron if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(linear[:-1]):
        if int(layer.out_features * (1 - share)) == 0:  # as the library counts
            raise ConfigurationError(
                f"pruned_share={share:g} takes all {layer.out_features} units of hidden layer "
                f"{number}; expected one to be left. Lower it"
            )
    pruner = torch_pruning.pruner.MagnitudePruner(
        perceptron.eval(),
        example_inputs=torch.zeros(1, linear[0].in_features),
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=share,
        ignored_layers=[linear[-1]],
    )
    pruner.step()


def _perceptron(network: Mapping[str, Tensor]) -> nn.Sequential:
    """The perceptron that a state is of, with the state's names."""
    layers: list[nn.Module] = []
    positions = _layers(network)
    for position in range(positions[-1] + 1):
        if position not in positions:  # activations, and dropout, which does nothing here
            layers.append(nn.ReLU() if position - 1 in positions else nn.Identity())
            continue
        units, inputs = network[f"{PREFIX}{position}.weight"].shape
        layers.append(nn.Linear(inputs, units))
    made = nn.Sequential(*layers)
    state = {name.removeprefix(PREFIX): v for name, v in network.items() if PREFIX in name}
    made.load_state_dict(state)
    return made


def _layers(network: Mapping[str, Tensor]) -> list[int]:
    """Positions of the linear layers, in order."""
    weights = [name for name in network if name.startswith(PREFIX) and name.endswith(".weight")]
    if len(weights) < 2:
        raise ConfigurationError(
            "the network has no hidden layer of PyTorch's to prune (it has "
            f"{', '.join(list(network)[:4])}, ...); networks of network='torch' can be pruned, the "
            "others taught: choose method 'distillation'"
        )
    return sorted(int(name.split(".")[1]) for name in weights)
