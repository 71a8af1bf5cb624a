"""What a smaller network begins with and is asked to do: decided before anything is trained.

Pruning takes whole units out of a trained perceptron, so that what is left is a smaller, dense one;
see Fang et al., "DepGraph: Towards Any Structural Pruning" (2023), whose library takes the same
units out. A unit's importance is the Euclidean norm of all weights into it and out of it. What is
left is where a training begins: without one, a network that lost much of itself is of little use.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from pydantic import ValidationError
from torch import Tensor

from tasks.contracts.base import Artifact, Contract
from tasks.contracts.release import CompressionParent
from tasks.contracts.training import CompressedModel, ModelCompression, StartingPoint, TrainedModel
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.training.checkpoints.store import serialized
from tasks.training.compression.config import CompressionConfig
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig
from tasks.training.models.config import NETWORK

# Of the present configuration, not of the parent's, which an earlier release may have written.
CARRIED_OUT = EXECUTION_FIELDS | {"strategy"}
PREFIX = "perceptron."
CHECKPOINT = "pruned.pt"


class StudentPlan(Contract):
    """A smaller network before it is trained."""

    compression: ModelCompression
    config: TrainingConfig
    initial: StartingPoint | None
    """What pruning left; None for a network that begins from scratch."""


def plan_student(
    parent: CompressionParent,
    config: CompressionConfig,
    present: TrainingConfig,
    store: ArtifactStore,
) -> StudentPlan:
    """Decide what a smaller network is, and prune the parent where that is asked for.

    It is trained as the parent was (rows, seed, batches, bins), but for its size and what `config`
    says; how ranks carry that out is the use case's present choice.

    Args:
        parent: whose network is made smaller.
        config: how.
        present: the use case's training configuration.
        store: holds the parent's checkpoint, and takes a pruned one.

    Raises:
        ConfigurationError: the parent's settings cannot be read any more, the network is no smaller
            than the parent's, or cannot be pruned.
        ArtifactError: the parent's checkpoint is absent or damaged.
        StorageError: the disk refused a write.
    """
    was = _trained_as(parent)
    weights = read_checkpoint(parent.checkpoint, store)["network"]
    initial, sizes = None, config.hidden_sizes
    if config.prunes:
        initial = pruned_start(parent, config.pruned_share, store)
        sizes = hidden_sizes_of(read_checkpoint(initial.checkpoint, store)["network"])
    asked = {
        "hidden_sizes": sizes,
        "max_embedding_size": config.max_embedding_size or was.max_embedding_size,
        "num_bins": config.num_bins or was.num_bins,
        "dropout": was.dropout if config.dropout is None else config.dropout,
        "max_epochs": config.max_epochs,
        # To the end: what was pruned first loses, and gains when the rate falls.
        "patience": config.max_epochs,
        **{"start": "scratch", "replay_share": None},
    }
    student = was.model_copy(update={**{k: v for k, v in present if k in CARRIED_OUT}, **asked})
    _check_smaller(was, student, config)
    compression = ModelCompression(
        parent=parent.program.version,
        method=config.method,
        settings=config.model_dump(mode="json"),
        parent_sizes=was.hidden_sizes,
        parent_parameters=num_parameters_of(weights),
        is_distilled=config.distils,
    )
    checked = TrainingConfig.model_validate(student.model_dump())
    return StudentPlan(compression=compression, config=checked, initial=initial)


def _trained_as(parent: CompressionParent) -> TrainingConfig:
    made = parent.training_config.get("model", NETWORK)
    if made != NETWORK:
        raise ConfigurationError(
            f"{parent.program.version.name} version {parent.program.version.version} is "
            f"{made!r}, and only a network of ours can be made smaller; name a version that is "
            "one, or convert this one to fewer bits. Nothing was trained"
        )
    try:
        was = parent.training_config
        return TrainingConfig.model_validate({k: was[k] for k in was.keys() - CARRIED_OUT})
    except ValidationError as exc:
        version = parent.program.version
        raise ConfigurationError(
            f"{version.name} version {version.version} was trained with settings that this release "
            f"does not read ({exc.error_count()} errors, the first in "
            f"{'.'.join(map(str, exc.errors()[0]['loc'])) or 'all'}), so no smaller network can be "
            "trained as it was. Train a new version first"
        ) from exc


def _check_smaller(was: TrainingConfig, student: TrainingConfig, config: CompressionConfig) -> None:
    def sizes(of: TrainingConfig) -> tuple[int, int, int]:
        # Weights between the hidden layers, and one input for each unit of the first.
        weights = sum(a * b for a, b in pairwise((1, *of.hidden_sizes, 1)))
        return weights, of.max_embedding_size, of.num_bins

    def described(of: TrainingConfig) -> str:
        return (
            f"hidden_sizes {'-'.join(map(str, of.hidden_sizes))}, max_embedding_size "
            f"{of.max_embedding_size}, num_bins {of.num_bins}"
        )

    after, before = sizes(student), sizes(was)
    if after == before or any(a > b for a, b in zip(after, before, strict=True)):
        raise ConfigurationError(
            f"the small network would have {described(student)}, the large one has "
            f"{described(was)}; expected a smaller one for method {config.method!r}. Nothing was "
            "trained"
        )


def pruned_start(parent: CompressionParent, share: float, store: ArtifactStore) -> StartingPoint:
    """The parent's weights without the least important units, for a training to begin with.

    Args:
        parent: whose network is pruned; it stays as it is.
        share: of the units of each hidden layer that go.
        store: holds the parent's checkpoint and takes the pruned one, under a key of its content.

    Raises:
        ConfigurationError: a layer would be left empty, or the network has none.
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
    """Units of each hidden layer of a network's state."""
    return tuple(len(network[f"{layer}.bias"]) for layer in _layers(network)[:-1])


def num_parameters_of(network: Mapping[str, Tensor]) -> int:
    """Trained numbers of a network's state: embeddings and perceptron, not what was fitted."""
    fitted = ("numbers.", "unknown")
    return sum(value.numel() for name, value in network.items() if not name.startswith(fitted))


def pruned_weights(network: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """The state of a network without the least important units of each hidden layer.

    Args:
        network: names to tensors; it stays as it is.
        share: of the units of each hidden layer that go, rounded up.

    Raises:
        ConfigurationError: a layer would be left empty, or the network has no hidden layer.
    """
    left = {name: value.clone() for name, value in network.items()}
    for layer, following in pairwise(_layers(network)):
        into, out = network[f"{layer}.weight"], network[f"{following}.weight"]
        num_kept = int(len(into) * (1 - share))
        if num_kept == 0:
            raise ConfigurationError(
                f"pruned_share={share:g} takes all {len(into)} units of hidden layer {layer}; "
                "expected one to be left. Lower it"
            )
        importance = into.square().sum(1) + out.square().sum(0)
        kept = importance.topk(num_kept).indices.sort().values
        left[f"{layer}.weight"] = left[f"{layer}.weight"][kept]
        left[f"{layer}.bias"] = left[f"{layer}.bias"][kept]
        left[f"{following}.weight"] = left[f"{following}.weight"][:, kept]
    return left


def _layers(network: Mapping[str, Tensor]) -> list[str]:
    """Names of the perceptron's linear layers, in order."""
    weights = [name for name in network if name.startswith(PREFIX) and name.endswith(".weight")]
    if len(weights) < 2:
        raise ConfigurationError(
            f"the network has no hidden layer to prune (it has {', '.join(list(network)[:4])}, "
            "...); choose method 'distillation'"
        )
    return sorted(
        (name.removesuffix(".weight") for name in weights),
        key=lambda layer: int(layer.removeprefix(PREFIX)),
    )


def chosen(
    compression: ModelCompression, distilled: TrainedModel | None, control: TrainedModel
) -> tuple[CompressedModel, str]:
    """The better of the distilled network and its control run by the validation rows, and why.

    Not by the test rows: those judge what was chosen. Where both are as good, the simpler way.

    Args:
        compression: how they were made.
        distilled: learnt from labels and the parent's scores; None where there was no teacher.
        control: the same from labels alone.
    """
    model, is_distilled, reason = control, False, "there was no teacher"
    if distilled is not None:
        ours, theirs = (model.epochs[model.best_epoch] for model in (distilled, control))
        is_distilled = ours.quality > theirs.quality
        model = distilled if is_distilled else control
        reason = (
            f"on the validation rows the distilled network has {ours.quality_name} "
            f"{ours.quality:.4f}, the control run {theirs.quality:.4f}; the "
            f"{'distilled network' if is_distilled else 'control run'} is offered"
        )
    made = compression.model_copy(update={"is_distilled": is_distilled})
    content = {**model.model_dump(), "compression": made.model_dump()}
    return CompressedModel.model_validate(content), reason
