from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.training.launch.config import LaunchConfig


@pytest.mark.parametrize("config", [LaunchConfig(), LaunchConfig(ranks=3, threads_per_rank=2)])
def test_a_configuration_survives_a_file(config: LaunchConfig) -> None:
    assert LaunchConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 0},
        {"ranks": 257},
        {"ranks": "many"},
        {"threads_per_rank": 0, "ranks": 1},
        {"unknown": 1},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LaunchConfig.model_validate(changes)


@pytest.mark.parametrize("field", ["probe_above_s", "probe_limit_s", "probe_max_ranks", "min_gain"])
def test_settings_of_the_measurement_that_chose_ranks_are_refused_with_what_to_set(
    field: str,
) -> None:
    with pytest.raises(ValidationError, match=rf"launch has {field}.*set launch\.ranks"):
        LaunchConfig.model_validate({"ranks": "auto", field: 1})
