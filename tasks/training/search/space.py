"""From points of a search space to training configurations, and to the terms of Optuna."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from tasks.kernel.errors import ConfigurationError, TrainingError
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig
from tasks.training.search.config import Choices, Dimension, FloatRange, SearchConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Point = Mapping[str, float | int | str]
"""Field to value, as a study keeps it: a choice is its JSON."""

# A better seed is luck on the validation window, not a better model.
NOT_SEARCHED = EXECUTION_FIELDS | {"seed"}


def check_space(base: TrainingConfig, config: SearchConfig) -> None:
    """Refuse a space that names what cannot be searched, or whose bounds a field does not take.

    Raises:
        ConfigurationError: the sentence names the field.
    """
    for name, dimension in config.space.items():
        if name.split(".")[0] in NOT_SEARCHED:
            raise ConfigurationError(
                f"search.space: {name} does not make a better model (it says how a training is "
                "carried out, or is the seed); remove it from the space"
            )
        for value in _extremes(dimension):
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
        first, *inner = name.split(".")
        if inner and isinstance(fields.get(first), BaseModel):
            fields[first] = fields[first].model_dump(mode="json")
        *folders, last = first, *inner
        place: Any = fields
        for folder in folders:
            place = place.get(folder) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            raise TrainingError(
                f"{name} is no field of the training configuration; expected such as learning_rate"
            )
        place[last] = json.loads(value) if isinstance(value, str) else value
    try:
        return TrainingConfig.model_validate(fields)
    except ValidationError as exc:
        said = "; ".join(e["msg"].removeprefix("Value error, ") for e in exc.errors())
        raise TrainingError(f"{told(point)}: {said}") from exc


def told(point: Point) -> str:
    """The point in words: `dropout=0.2, hidden_sizes=[64, 32]`."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else format(value, '.4g')}"
        for name, value in point.items()
    )


def distributions(config: SearchConfig) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
    return {name: _distribution(dimension) for name, dimension in config.space.items()}


def grid_point(config: SearchConfig, number: int) -> Point | None:
    """The `number`-th point of the grid in the seed's order; None past the last one."""
    axes: list[Sequence[float | int | str]] = [d.grid() for d in config.space.values()]
    points = list(itertools.product(*axes))
    random.Random(config.seed).shuffle(points)
    if number >= len(points):
        return None
    return dict(zip(config.space, points[number], strict=True))


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dimension, Choices):
        return CategoricalDistribution(dimension.names())
    if isinstance(dimension, FloatRange):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    return IntDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _extremes(dimension: Dimension) -> list[float | int | str]:
    if isinstance(dimension, Choices):
        return list(dimension.names())
    return [dimension.low, dimension.high]
