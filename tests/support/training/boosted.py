"""Small boosted trees, trained on the rows of the tests."""

from pathlib import Path
from typing import Any

from tasks.contracts.training import TrainedModel
from tasks.kernel.settings import ArtifactStore
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.models.making import make_model
from tests.support.data.builders import dataset, frame, splits

SMALL = {"max_iterations": 40, "learning_rate": 0.2, "max_leaf_nodes": 8, "min_leaf_rows": 20}


def boosting_config(threads: int = 1, **changes: Any) -> TrainingConfig:
    """A training of few small trees, with some of their settings changed."""
    return TrainingConfig.model_validate(
        {
            "model": "gradient-boosting",
            "min_category_rows": 5,
            "launch": {"threads_per_rank": threads},
            "boosting": SMALL | changes,
        }
    )


def boosted(store: ArtifactStore, work: Path, **changes: Any) -> TrainedModel:
    """Trees on the rows that `conversion.programs.tabular_job` has too."""
    request = TrainingRequest(dataset(store, frame()), splits(), boosting_config(**changes))
    return make_model(request, store, work)
