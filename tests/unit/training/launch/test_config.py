from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.training.launch.config import LaunchConfig


def test_the_number_of_ranks_is_measured_unless_it_is_given() -> None:
    assert LaunchConfig().ranks == "auto"
    assert LaunchConfig(ranks=2, threads_per_rank=4).threads_per_rank == 4
    assert LaunchConfig(ranks=2).threads_per_rank == "auto"


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
        {"probe_limit_s": 0},
        {"min_gain": -0.1},
        {"unknown": 1},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LaunchConfig.model_validate(changes)


def test_threads_without_ranks_are_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="the probe weighs ranks against threads, so give"):
        LaunchConfig(threads_per_rank=2)
