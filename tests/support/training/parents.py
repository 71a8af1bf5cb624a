"""Small networks with what is fitted before them, and one as the registry hands it over."""

from typing import Any

import numpy as np
import torch

from tasks.contracts.data import category_code
from tasks.contracts.release import CompressionParent, RegisteredProgram
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key
from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.data.preprocess import Float32Array, LabelScale, Preprocessing, fit_edges
from tests.support.data.builders import COLUMNS, splits, version_ref

LARGE = TrainingConfig(hidden_sizes=(32, 16), num_shards=4, global_batch_size=64, seed=3)
SCALE = LabelScale(mean=3300.0, deviation=2000.0)
CONFIG = TrainingConfig(hidden_sizes=(16, 8))


def preprocessing(num_rows: int = 500, num_bins: int = 6) -> Preprocessing:
    """Three category columns, four numbers: two ordinary, one constant, one with missing values."""
    rng = np.random.default_rng(3)
    vocabularies = [
        np.array(sorted(category_code(c) for c in names), dtype=np.int32)
        for names in (("AA", "UA", "EV"), ("JFK",), ("ORD", "MIA", "LAX", "ATL", "IAH"))
    ]
    columns = [rng.normal(50, 20, num_rows), rng.gamma(1, 9, num_rows), np.full(num_rows, 7.0)]
    columns.append(np.where(rng.random(num_rows) < 0.5, np.nan, rng.random(num_rows)))
    edges = [fit_edges(column.astype(np.float32), num_bins) for column in columns]
    return Preprocessing(tuple(vocabularies), tuple(edges), flagged=(3,))


def raw_rows(
    fitted: Preprocessing, num_rows: int, seed: int = 0
) -> tuple[np.ndarray, Float32Array]:
    """Raw inputs with known, unseen and missing categories and odd numbers."""
    rng = np.random.default_rng(seed)
    codes = [
        rng.choice(np.concatenate([v, [0, category_code("never seen")]]), num_rows)
        for v in fitted.vocabularies
    ]
    numeric = rng.normal(40, 60, (num_rows, len(fitted.edges))).astype(np.float32)
    numeric[rng.random(numeric.shape) < 0.2] = np.nan
    numeric[rng.random(numeric.shape) < 0.05] = np.inf
    numeric[rng.random(numeric.shape) < 0.05] = -np.inf
    return np.stack(codes, axis=1).astype(np.int32), numeric


def network_of(fitted: Preprocessing, config: TrainingConfig = CONFIG) -> TabularNetwork:
    torch.manual_seed(1)
    return TabularNetwork(fitted, config).eval()


def weights_of(network: torch.nn.Module) -> dict[str, Any]:
    return dict(network.state_dict())


def large_network(config: TrainingConfig = LARGE) -> TabularNetwork:
    return network_of(preprocessing(), config)


def parent(
    store: ArtifactStore, config: TrainingConfig = LARGE, **changes: object
) -> CompressionParent:
    """A version with that network; `changes` are of its recorded training configuration."""
    fitted = preprocessing()
    recorded = {**config.model_dump(mode="json"), **changes}

    def build(folder: StagedFolder) -> CompressionParent:
        state = {"network": weights_of(large_network(config)), "preprocessing": fitted.state()}
        torch.save(state, folder.path / "checkpoint.pt")
        (folder.path / "program.pt2").write_bytes(b"program")
        program = folder.artifact("program.pt2")
        version = version_ref(program.sha256, version=7, run_id="r7")
        return CompressionParent(
            program=RegisteredProgram(version=version, program=program, columns=COLUMNS),
            checkpoint=folder.artifact("checkpoint.pt"),
            splits=splits(),
            training_config=recorded,
        )

    return store.build_once("parents", content_key(recorded), CompressionParent, build)
