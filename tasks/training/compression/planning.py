"""What a smaller network begins with and is asked to do: decided before anything is trained."""

from __future__ import annotations

import itertools

from pydantic import ValidationError

from tasks.contracts.release import CompressionParent
from tasks.contracts.training import ModelCompression
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore
from tasks.training.compression.config import ShrinkingConfig
from tasks.training.compression.distillation import StudentPlan
from tasks.training.compression.pruning import (
    hidden_sizes_of,
    num_parameters_of,
    pruned_start,
    read_checkpoint,
)
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig

# Of the present configuration, not of the parent's, which an earlier release may have written.
CARRIED_OUT = EXECUTION_FIELDS | {"strategy"}


def plan_student(
    parent: CompressionParent,
    config: ShrinkingConfig,
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
    carried_out = {k: v for k, v in present if k in CARRIED_OUT}
    student = was.model_copy(update={**carried_out, **asked})
    _check_smaller(was, student, config)
    shrinking = ModelCompression(
        parent=parent.program.version,
        method=config.method,
        settings=config.model_dump(mode="json"),
        parent_sizes=was.hidden_sizes,
        parent_parameters=num_parameters_of(weights),
        is_taught=config.teaches,
    )
    checked = TrainingConfig.model_validate(student.model_dump())
    return StudentPlan(shrinking=shrinking, config=checked, initial=initial)


def _trained_as(parent: CompressionParent) -> TrainingConfig:
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


def _check_smaller(was: TrainingConfig, student: TrainingConfig, config: ShrinkingConfig) -> None:
    sizes = [(_num_weights(c), c.max_embedding_size, c.num_bins) for c in (student, was)]
    if sizes[0] == sizes[1] or any(after > before for after, before in zip(*sizes, strict=True)):
        raise ConfigurationError(
            f"the small network would have {_told(student)}, the large one has {_told(was)}; "
            f"expected a smaller one for method {config.method!r}. Nothing was trained"
        )


def _num_weights(config: TrainingConfig) -> int:
    """Weights between the hidden layers, and one input for each unit of the first."""
    sizes = (1, *config.hidden_sizes, 1)
    return sum(a * b for a, b in itertools.pairwise(sizes))


def _told(config: TrainingConfig) -> str:
    return (
        f"hidden_sizes {'-'.join(map(str, config.hidden_sizes))}, max_embedding_size "
        f"{config.max_embedding_size}, num_bins {config.num_bins}"
    )
