from typing import Any

import pytest

from tasks.registry.candidate import end_study, record_trials
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation, load_mlflow
from tasks.registry.mlflow_registry import Registry
from tests.support.reporting.studies import study, trial

CONFIG = RegistryConfig(model_name="delay", experiment="flights")


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> RegistryLocation:
    """One database for all: making its schema takes longer than the tests; studies differ."""
    folder = tmp_path_factory.mktemp("registry")
    return RegistryLocation(f"sqlite:///{folder / 'mlflow.db'}", folder / "artifacts")


def runs(location: RegistryLocation, name: str) -> dict[str, Any]:
    client = load_mlflow().MlflowClient(location.uri)
    experiment = client.get_experiment_by_name(CONFIG.experiment)
    found = client.search_runs([experiment.experiment_id], f"tags.search_study = '{name}'")
    return {run.data.tags["search_trial"]: run for run in found}


def test_each_trial_is_one_run_under_that_of_the_study(location: RegistryLocation) -> None:
    trials = [
        trial(0, point={"hidden_sizes": "[64, 32]", "strategy.name": '"ddp"'}),
        trial(1, "pruned", reason="rule median after epoch 3 of 8"),
        trial(2, "failed", auc=None, epochs=(), reason="the loss is nan", seconds=0.0),
        trial(3, seconds=0.0),
    ]
    assert record_trials("s-1", trials[:2], CONFIG, location) == 2
    assert record_trials("s-1", trials, CONFIG, location) == 2
    assert record_trials("s-1", trials, CONFIG, location) == 0
    assert record_trials("s-2", trials[:1], CONFIG, location) == 1

    client = load_mlflow().MlflowClient(location.uri)
    found = runs(location, "s-1")
    assert sorted(found) == ["0", "1", "2", "3", "whole"]
    statuses = [found[n].info.status for n in ("0", "1", "2", "3")]
    assert statuses == ["FINISHED", "KILLED", "FAILED", "FINISHED"]
    for number in ("0", "1", "2", "3"):
        tags = found[number].data.tags
        assert tags["mlflow.parentRunId"] == found["whole"].info.run_id
    assert found["2"].data.tags["reason"] == "the loss is nan"
    assert found["0"].data.params["hidden_sizes"] == "[64, 32]"
    history = client.get_metric_history(found["1"].info.run_id, "epoch_validation_auc")
    assert sorted(m.step for m in history) == [0, 1]


def test_a_run_that_was_cut_off_is_written_anew(location: RegistryLocation) -> None:
    record_trials("s-3", [trial(0)], CONFIG, location)
    half = Registry(location).start_run(
        CONFIG.experiment, "half", {"search_study": "s-3", "search_trial": "1"}
    )
    assert record_trials("s-3", [trial(0), trial(1)], CONFIG, location) == 1
    found = runs(location, "s-3")
    assert found["1"].info.run_id != half.run_id
    assert found["1"].info.status == "FINISHED"


def test_the_study_ends_with_its_best_trial(location: RegistryLocation) -> None:
    record = study(trial(0), trial(1, auc=0.71), trial(2, "pruned"), study="s-4")
    for _ in range(2):
        end_study(record, CONFIG, location)
    whole = runs(location, "s-4")["whole"]
    assert whole.info.status == "FINISHED"
    assert whole.data.metrics["best_trial"] == 1
    assert whole.data.metrics["trials_pruned"] == 1
    assert len(runs(location, "s-4")) == 4
