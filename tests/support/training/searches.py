"""A small search with real trainings: a flow, and a program that runs it with a folder's files."""

import sys
from pathlib import Path
from typing import Any

from prefect import flow

from flows.config import PipelineConfig, read_pipeline_config
from flows.training import run_trials
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.training import StudyRecord
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tasks.registry.task import end_study
from tasks.reporting.task import publish_search
from tests.support.data.builders import YEAR, month, splits

NUM_ROWS = 1600
TRAINING = {
    "num_shards": 4,
    "global_batch_size": 64,
    "max_epochs": 3,
    "hidden_sizes": [8],
    "num_bins": 4,
    "min_category_rows": 5,
}
SEARCH = {
    "num_trials": 3,
    "space": {
        "learning_rate": {"kind": "float", "low": 1e-3, "high": 1e-1, "log": True},
        "hidden_sizes": {"kind": "choices", "values": [[8], [16]]},
    },
    "pruner": "median",
}


def use_case(**search: Any) -> PipelineConfig:
    """The use case of the repository with the windows and the small training of the builders."""
    repository = PROJECT_ROOT / "feature_repo" / "flights"
    described = read_pipeline_config(repository).model_dump(mode="json") | {
        "window": YEAR.model_dump(mode="json"),
        "splits": splits().model_dump(mode="json"),
        "current": month(9).model_dump(mode="json"),
        "training": TRAINING,
        "search": SEARCH | search,
    }
    return PipelineConfig.model_validate(described)


@flow(name="search-under-test", persist_result=False)
def search_under_test(data: ValidatedDataset, config: PipelineConfig) -> StudyRecord:
    study = run_trials(data, config)
    end_study(study, config.registry)
    publish_search(study)
    return study


def trained_once(settings: Settings) -> int:
    return len([p for p in (settings.store.root / "models").iterdir() if p.name[0] != "."])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    search_under_test(
        ValidatedDataset.model_validate_json((folder / "data.json").read_text()),
        PipelineConfig.model_validate_json((folder / "config.json").read_text()),
    )
