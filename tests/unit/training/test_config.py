from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.training.config import EXECUTION_FIELDS, LaunchConfig, ReadingConfig, TrainingConfig
from tasks.training.elastic.config import ElasticConfig
from tasks.training.strategies.config import StrategyConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"launch": {"ranks": 0}},
        {"learning_rate": 0.0},
        {"dropout": 1.0},
        {"hidden_sizes": ()},
        {"strategy": {"name": "gossip"}},
        {"device": "tpu"},
        {"epochs": 3},
        {"launch": {"threads_per_rank": 0}},
        {"launch": {"min_gain": 1}},
    ],
)
def test_values_out_of_bounds_and_unknown_names_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig.model_validate(wrong)


def test_what_is_computed_does_not_depend_on_how_it_is_carried_out() -> None:
    one = TrainingConfig()
    two = TrainingConfig(
        launch=LaunchConfig(ranks=2),
        reading=ReadingConfig.model_validate({"mode": "stream"}),  # of an earlier release
        progress_timeout_s=7,
    )
    assert one.computation() == two.computation()
    assert one.computation() != TrainingConfig(seed=1).computation()
    shuffled = TrainingConfig(reading=ReadingConfig(shuffle_rows=1024))
    assert one.computation() != shuffled.computation()
    assert {*TrainingConfig.model_fields, "stall_warning_s"} >= EXECUTION_FIELDS


def test_elastic_ranks_hold_whole_networks() -> None:
    with pytest.raises(ValidationError, match="each rank must hold the whole network"):
        TrainingConfig(elastic=ElasticConfig(enabled=True), strategy=StrategyConfig(name="fsdp"))


def test_a_version_of_an_earlier_release_named_its_framework() -> None:
    assert TrainingConfig.model_validate({"network": "torch"}) == TrainingConfig()
