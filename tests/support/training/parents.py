"""A trained network as the registry hands it over, without a training."""

from __future__ import annotations

from typing import Any

import torch

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.release import RegisteredProgram, ShrinkingParent
from tasks.settings import ArtifactStore, StagedFolder, content_key
from tasks.training.config import TrainingConfig
from tasks.training.model import TabularNetwork
from tests.support.data.builders import COLUMNS, splits
from tests.unit.training.test_model import network_of, preprocessing

LARGE = TrainingConfig(hidden_sizes=(32, 16), num_shards=4, global_batch_size=64, seed=3)


def weights_of(network: torch.nn.Module) -> dict[str, Any]:
    return dict(network.state_dict())


def large_network(config: TrainingConfig = LARGE) -> TabularNetwork:
    return network_of(preprocessing(), config)


def parent(
    store: ArtifactStore, config: TrainingConfig = LARGE, **changes: object
) -> ShrinkingParent:
    """A version with that network; `changes` are of its recorded training configuration."""
    fitted = preprocessing()
    recorded = {**config.model_dump(mode="json"), **changes}

    def build(folder: StagedFolder) -> ShrinkingParent:
        state = {"network": weights_of(large_network(config)), "preprocessing": fitted.state()}
        torch.save(state, folder.path / "checkpoint.pt")
        (folder.path / "program.pt2").write_bytes(b"program")
        program = folder.artifact("program.pt2")
        version = ModelVersionRef(
            name="late",
            version=7,
            run_id="r7",
            program_sha256=program.sha256,
            snapshot_sha256="0" * 64,
        )
        return ShrinkingParent(
            program=RegisteredProgram(version=version, program=program, columns=COLUMNS),
            checkpoint=folder.artifact("checkpoint.pt"),
            splits=splits(),
            training_config=recorded,
        )

    return store.build_once("parents", content_key(recorded), ShrinkingParent, build)
