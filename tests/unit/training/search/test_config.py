from typing import Any

import pytest
from pydantic import ValidationError

from tasks.kernel.errors import ConfigurationError, TrainingError
from tasks.training.search.config import SearchConfig, check_space, configured, described
from tests.support.training.trials import BASE, SPACE, search


def space_of(**fields: Any) -> SearchConfig:
    return search(space=fields)


def test_a_point_changes_its_fields_alone() -> None:
    point = {"learning_rate": 0.03, "hidden_sizes": "[64, 32]", "num_bins": 8}
    made = configured(BASE, point)
    assert (made.learning_rate, made.hidden_sizes, made.num_bins) == (0.03, (64, 32), 8)
    assert made.model_copy(update={name: getattr(BASE, name) for name in point}) == BASE
    assert described(point) == "learning_rate=0.03, hidden_sizes=[64, 32], num_bins=8"


def test_settings_of_trees_are_searched_and_no_trial_of_trees_ends_early() -> None:
    trees = BASE.model_copy(update={"model": "gradient-boosting"})
    check_space(
        trees, space_of(**{"boosting.learning_rate": {"kind": "float", "low": 0.02, "high": 0.2}})
    )
    made = configured(trees, {"boosting.max_leaf_nodes": 15})
    assert made.boosting == trees.boosting.model_copy(update={"max_leaf_nodes": 15})
    assert (made.judged_epochs, BASE.judged_epochs) == (1, BASE.max_epochs)
    with pytest.raises(ConfigurationError, match="boosting"):
        check_space(
            trees, space_of(**{"boosting.max_leaf_nodes": {"kind": "int", "low": 1, "high": 64}})
        )


@pytest.mark.parametrize(
    ("dimension", "sentence"),
    [
        ({"kind": "float", "low": 1, "high": 0}, "is not below"),
        ({"kind": "float", "low": 0, "high": 1, "log": True}, "has no logarithm"),
        ({"kind": "float", "low": float("nan"), "high": 1}, "finite number"),
        ({"kind": "int", "low": 1, "high": 6, "step": 2}, "set high=5"),
        ({"kind": "int", "low": 1, "high": 6, "log": True, "step": 5}, "expected step 1"),
        ({"kind": "choices", "values": [[1, 2], [1, 2]]}, "listed twice"),
        ({"kind": "choices", "values": [1]}, "at least 2 items"),
    ],
)
def test_a_dimension_that_is_none_is_refused(dimension: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        space_of(dropout=dimension)


@pytest.mark.parametrize(
    ("field", "dimension", "sentence"),
    [
        ("dropuot", SPACE["dropout"], "dropuot is no field"),
        ("dropout.deep", SPACE["dropout"], "dropout.deep is no field"),
        ("dropout", {"kind": "float", "low": 0.1, "high": 1.5}, "less than 1"),
        ("hidden_sizes", {"kind": "choices", "values": [[8], "wide"]}, 'hidden_sizes="wide"'),
        ("launch.ranks", {"kind": "int", "low": 1, "high": 4}, "does not make a better model"),
        ("seed", {"kind": "int", "low": 1, "high": 4}, "does not make a better model"),
        ("global_batch_size", {"kind": "int", "low": 10, "high": 90}, "use a multiple of"),
    ],
)
def test_a_space_that_the_training_cannot_take_is_refused_before_anything_runs(
    field: str, dimension: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_space(BASE, search(space={field: dimension}))


def test_values_that_do_not_go_together_fail_the_trial_alone() -> None:
    with pytest.raises(TrainingError, match="num_shards=7"):
        configured(BASE, {"num_shards": 7})


def test_an_address_is_not_accepted_as_storage_and_not_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        search(storage="postgresql://user:hunter2@db/search")
    assert "name of an environment variable" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_more_trials_go_on_with_the_same_study_and_another_space_begins_one() -> None:
    assert search(num_trials=5).identity() == search(num_trials=50, budget_s=60).identity()
    assert search().identity() != space_of(dropout=SPACE["dropout"]).identity()
