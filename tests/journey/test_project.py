"""The finished loop as a project in Python."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import falaj
from tests.support.platform.loops import Loop

pytestmark = pytest.mark.timeout(900)
KEYS = ["carrier", "origin", "dest", "tailnum", "event_timestamp"]


@pytest.fixture(scope="module")
def project(loop: Loop) -> falaj.Project:
    return falaj.open(loop.repository.path, home=loop.home)


def test_the_champion_answers_as_it_was_judged(project: falaj.Project, loop: Loop) -> None:
    assert project.latest_run().metric == loop.record.evaluation.overall.primary
    judged = pd.read_parquet(loop.path(loop.record.evaluation.predictions)).set_index("flight_id")
    rows = project.training_set().set_index("flight_id").loc[judged.index[:5000]]
    scores = project.champion().predict(rows)
    assert scores.index.equals(rows.index)
    np.testing.assert_allclose(scores, judged["score"][:5000], atol=1e-4)


def test_features_of_history_are_those_of_training(project: falaj.Project) -> None:
    trained = project.training_set().tail(50)
    found = project.features(trained[KEYS], at="event_timestamp")
    features = [name for name in trained if "__" in name]
    pd.testing.assert_frame_equal(found[features], trained[features], check_dtype=False)


def test_features_of_now_are_of_the_online_store(project: falaj.Project) -> None:
    found = project.features(project.training_set().tail(3)[KEYS[:-1]])
    assert len(found) == 3
    assert {name for name in found if "__" in name} == {
        name for name in project.training_set() if "__" in name
    }


def test_a_moment_without_a_zone_is_refused(project: falaj.Project) -> None:
    rows = project.training_set().tail(3)
    naive = rows[KEYS].assign(event_timestamp=rows["event_timestamp"].dt.tz_localize(None))
    with pytest.raises(falaj.DataContractError, match="expected times with a zone"):
        project.features(naive, at="event_timestamp")


def test_a_notebook_shows_what_matters(project: falaj.Project) -> None:
    shown = project._repr_html_()
    assert project.latest_run().record.version.name in shown
    assert "AUC" in shown
    assert project.champion()._repr_html_().startswith("<table>")


def test_versions_are_listed_with_their_aliases(project: falaj.Project) -> None:
    versions = project.models()  # other tests of the loop may have added newer ones
    assert versions["version"].is_monotonic_decreasing
    champion = versions[versions["aliases"].str.contains("champion")]
    assert champion["version"].tolist() == [project.champion().version]
    assert (champion["low"] < champion["value"]).all()


def test_a_project_without_a_model_says_what_to_do(
    project: falaj.Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = falaj.Project(replace(project.settings, home=tmp_path_factory.mktemp("empty")))
    with pytest.raises(falaj.ConfigurationError, match=r"begin one with run\(\)"):
        empty.latest_run()
    with pytest.raises(falaj.FalajError, match=r"run\(\) trains and promotes one"):
        empty.champion()
