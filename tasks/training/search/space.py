"""From points of a search space to training configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tasks.kernel.errors import ConfigurationError, TrainingError
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig
from tasks.training.search.config import Choices, SearchConfig

Point = Mapping[str, float | int | str]
"""Field to value, as a study keeps it: a choice is its JSON."""

# A better seed is luck on the validation window, not a better model.
NOT_SEARCHED = EXECUTION_FIELDS | {"seed"}


def check_space(base: TrainingConfig, config: SearchConfig) -> None:
    """Refuse a space that names what cannot be searched, or whose bounds a field does not take.

    Raises:
        ConfigurationError: names the field.
    """
    for name, dimension in config.space.items():
        if name.split(".")[0] in NOT_SEARCHED:
            raise ConfigurationError(
                f"search.space: {name} does not make a better model (it says how a training is "
                "carried out, or is the seed); remove it from the space"
            )
        extremes: list[float | int | str] = (
            [*dimension.names()]
            if isinstance(dimension, Choices)
            else [dimension.low, dimension.high]
        )
        for value in extremes:
            try:
                configured(base, {name: value})
            except TrainingError as exc:
                raise ConfigurationError(f"search.space: {exc}") from exc


def configured(base: TrainingConfig, point: Point) -> TrainingConfig:
    """The training configuration of a point; all other fields are `base`'s.

    Raises:
        TrainingError: there is no such field, or the values do not go together.
    """
    fields: dict[str, Any] = dict(base)
    for name, value in point.items():
        *folders, last = name.split(".")
        inside: Any = fields
        for folder in folders:
            if isinstance(inside, dict) and isinstance(inside.get(folder), BaseModel):
                inside[folder] = dict(inside[folder])
            inside = inside.get(folder) if isinstance(inside, dict) else None
        if not isinstance(inside, dict) or last not in inside:
            raise TrainingError(
                f"{name} is no field of the training configuration; expected such as learning_rate"
            )
        inside[last] = json.loads(value) if isinstance(value, str) else value
    try:
        return TrainingConfig.model_validate(fields)
    except ValidationError as exc:
        reasons = "; ".join(e["msg"].removeprefix("Value error, ") for e in exc.errors())
        raise TrainingError(f"{described(point)}: {reasons}") from exc


def described(point: Point) -> str:
    """The point in words: `dropout=0.2, hidden_sizes=[64, 32]`."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else format(value, '.4g')}"
        for name, value in point.items()
    )
