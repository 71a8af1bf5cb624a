"""What one search is asked to do: the space, how it is walked, and when a trial is not worth it."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from tasks.governance.handling import Address
from tasks.kernel.errors import ConfigurationError, TrainingError
from tasks.kernel.values import Described
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig

Plain = bool | int | float | str


class _Frozen(Described):
    # The input is kept out of error texts: somebody may have written a secret where a name goes.
    model_config = ConfigDict(hide_input_in_errors=True)


class FloatRange(_Frozen):
    """A real number between two bounds, both included."""

    kind: Literal["float"] = "float"
    low: float = Field(allow_inf_nan=False, description="Lower bound.")
    high: float = Field(allow_inf_nan=False, description="Upper bound.")
    log: bool = Field(default=False, description="Search by factors instead of by steps.")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        _check_bounds(self.low, self.high, self.log)
        return self


class IntRange(_Frozen):
    """A whole number between two bounds, both included, in equal steps from the lower one."""

    kind: Literal["int"]
    low: int = Field(description="Lower bound.")
    high: int = Field(description="Upper bound.")
    step: PositiveInt = Field(default=1, description="Distance of two neighbours.")
    log: bool = Field(default=False, description="Search by factors; with step 1 only.")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        _check_bounds(self.low, self.high, self.log)
        if self.log and self.step != 1:
            raise ValueError(f"log with step={self.step}; expected step 1, or no log")
        if (self.high - self.low) % self.step:
            reached = self.high - (self.high - self.low) % self.step
            raise ValueError(
                f"steps of {self.step} from low={self.low} never reach high={self.high}; "
                f"set high={reached}"
            )
        return self


class Choices(_Frozen):
    """One of a few values; a list is one value, such as the sizes of layers."""

    kind: Literal["choices"]
    values: tuple[Plain | tuple[Plain, ...], ...] = Field(min_length=2, max_length=100)
    """What can be chosen."""

    @model_validator(mode="after")
    def _are_different(self) -> Self:
        if len(set(self.names())) < len(self.values):
            raise ValueError("a value is listed twice; expected different ones")
        return self

    def names(self) -> list[str]:
        """The values as JSON: what the study keeps."""
        return [json.dumps(value) for value in self.values]


def _check_bounds(low: float, high: float, log: bool) -> None:
    if low >= high:
        raise ValueError(f"low={low} is not below high={high}; expected a range")
    if log and low <= 0:
        raise ValueError(f"low={low} has no logarithm; expected a number above 0, or log: false")


Dimension = Annotated[FloatRange | IntRange | Choices, Field(discriminator="kind")]


class SearchConfig(_Frozen):
    """One search over a training configuration; logged whole with the run."""

    space: dict[str, Dimension] = Field(default={}, max_length=50)
    """Fields of the training configuration (`a.b` is field b of field a) to what they may be. The
    others keep what the use case says."""
    num_trials: PositiveInt = Field(default=12, le=100_000)
    """Trials of the study, those of earlier runs included."""
    parallel_trials: PositiveInt = Field(default=1, le=256)
    """Trials at a time. On one machine they share its cores."""
    work_pool: str = Field(default="", max_length=100)
    """Deployment of flow `trial` that runs the trials, such as `cpu` for `trial/cpu`. Empty: in the
    process of the search."""
    budget_s: float | None = Field(default=None, gt=0)
    """Training seconds of all the study's trials together after
    which none is started. None: no bound."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How the next point is chosen. `tpe`: where good trials are denser than bad ones (Bergstra et
    al., 2011), after five random ones."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of every choice.")
    pruner: Literal["none", "median"] = "median"
    """When a trial ends early. `median`: where its best validation
    AUC so far is below the median of the finished trials' at the same
    epoch; not in the first four trials and the first two epochs."""
    storage: Annotated[str, Address("trials", variable=True)] = Field(default="", max_length=100)
    """Where the study is kept. Empty: SQLite under the state folder. Else the NAME of an
    environment variable that holds a PostgreSQL address, or with `_FILE` added the path of a file
    that does."""

    @field_validator("space")
    @classmethod
    def _names_are_paths(cls, space: dict[str, Dimension]) -> dict[str, Dimension]:
        for name in space:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError("a name in the space is no field; expected such as dropout or a.b")
        return space

    @field_validator("storage")
    @classmethod
    def _is_a_name(cls, storage: str) -> str:
        if storage and not (storage.isidentifier() and storage.isupper()):
            raise ValueError(
                "expected the name of an environment variable in capitals, such as "
                "SEARCH_STORAGE_URL; an address may hold a password and is not written here"
            )
        return storage

    def identity(self) -> dict[str, object]:
        """The fields that make a study what it is: a change of any begins another study."""
        return self.model_dump(mode="json", include={"space", "sampler", "seed", "pruner"})


Point = Mapping[str, float | int | str]
"""Field to value, as a study keeps it: a choice is its JSON."""

# A better seed is luck on the validation window, not a better model.


def check_space(base: TrainingConfig, config: SearchConfig) -> None:
    """Refuse a space that names what cannot be searched, or whose bounds a field does not take.

    Raises:
        ConfigurationError: names the field.
    """
    for name, dimension in config.space.items():
        if name.split(".")[0] in EXECUTION_FIELDS | {"seed"}:
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
    fields = base.model_dump()
    for name, value in point.items():
        *folders, last = name.split(".")
        inside: Any = fields
        for folder in folders:
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
