"""Searches with real trainings under a real Prefect API."""

import signal
from pathlib import Path

import pytest

from flows.training import with_best_trial
from tasks.kernel.settings import Settings
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.launch.launcher import launch_training
from tests.support.data.builders import dataset, frame
from tests.support.host.processes import pids_whose_command_holds, python, wait_until
from tests.support.services.prefect_platform import PrefectApi
from tests.support.training.searches import NUM_ROWS, search_under_test, trained_once, use_case

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_trials_are_trained_and_drawn(on_prefect: None, settings: Settings) -> None:
    data, config = dataset(settings.store, frame(NUM_ROWS)), use_case(parallel_trials=2)

    study = search_under_test(data, config)

    assert [trial.number for trial in study.trials] == [0, 1, 2]
    complete = [trial for trial in study.trials if trial.state == "complete"]
    assert study.best in {trial.number for trial in complete}
    assert trained_once(settings) == len(complete)
    assert not list((settings.home / "training" / "trials" / study.study).iterdir())

    # The best trial's model is there: training its configuration trains nothing.
    best = with_best_trial(config, study)
    before = settings.store.num_builds
    epochs: list[object] = []
    work = settings.home / "training"
    request = TrainingRequest(data, config.splits, best.training)
    model = launch_training(request, settings.store, work, epochs.append)
    assert (settings.store.num_builds, epochs) == (before, [])
    assert max(e.validation_auc for e in model.epochs) == study.trials[study.best or 0].auc

    again = search_under_test(data, config)
    assert again.trials == study.trials
    page = (settings.reports / study.study / "search.html").read_text(encoding="utf-8")
    titles = "Optimisation history", *(f"AUC by {field.name}" for field in study.fields)
    assert [title for title in titles if title not in page] == []


def test_a_search_that_is_killed_goes_on_where_it_was(
    prefect_api: PrefectApi, on_prefect: None, settings: Settings, tmp_path: Path
) -> None:
    data = dataset(settings.store, frame(NUM_ROWS))
    config = use_case(num_trials=2, pruner="none")
    (tmp_path / "data.json").write_text(data.model_dump_json())
    (tmp_path / "config.json").write_text(config.model_dump_json())
    trials = settings.home / "training" / "trials"
    line = ("-m", "tests.support.training.searches", str(tmp_path))
    with python(*line, env=prefect_api.command_environment()) as search:
        # The first trial is done and the second one has a checkpoint.
        wait_until(
            lambda: (
                (settings.store.root / "models").is_dir()
                and trained_once(settings) == 1
                and list(trials.glob("search-*/*/*/epochs.jsonl"))
            ),
            "the second trial's first epoch",
            300,
        )
        search.send_signal(signal.SIGKILL)
    wait_until(lambda: not pids_whose_command_holds(str(trials)), "all ranks are gone", 60)
    builds = settings.store.num_builds

    study = search_under_test(data, config)

    assert [trial.state for trial in study.trials] == ["complete", "complete"]
    assert trained_once(settings) == 2
    assert settings.store.num_builds - builds <= 1  # the first trial was not trained again
