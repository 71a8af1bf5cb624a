"""What a diagnosis suggests becomes the next run's defaults, where its configuration allows it.

The rule: of the fields in `APPLIED_FIELDS`, one that a configuration leaves at its default takes
the value that the last diagnosis of the same kind of job left for it. Values that were applied stay
while nothing speaks against them, and none that was tried is suggested again: so runs settle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tasks.contracts.base import Contract
from tasks.contracts.telemetry import Diagnosis, Setting
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import content_key

LOGGER = logging.getLogger(__name__)
Config = TypeVar("Config", bound=BaseModel)

APPLIED_FIELDS = (
    "launch.ranks",
    "launch.threads_per_rank",
    "global_batch_size",
    "strategy.accumulation_steps",
)
"""Dotted fields of the training configuration."""
PASSING_FIELDS = ("telemetry", "seed", "max_epochs", "patience")
"""Fields that do not make another kind of job."""


class Advice(Contract):
    """What is kept for the next job of the same kind."""

    settings: dict[str, Setting]
    tried: dict[str, tuple[Setting, ...]]
    """Every value with which a job of this kind was diagnosed."""
    summary: str
    diagnosed: datetime


def kind_of_job(config: BaseModel, *parts: object) -> str:
    """Key of jobs that learn from each other: all but what suggestions and repetitions change.

    Args:
        config: a training configuration.
        parts: what else makes the kind, such as the columns of the data.
    """
    plain = config.model_dump(mode="json", exclude=set(PASSING_FIELDS))
    for field in APPLIED_FIELDS:
        _forget(plain, field.split("."))
    return content_key(plain, *parts)


def note_diagnosis(folder: Path, kind: str, config: BaseModel, diagnosis: Diagnosis) -> None:
    """Keep what a finished run's diagnosis suggests.

    Args:
        folder: holds the advice for all kinds of jobs.
        kind: from `kind_of_job`.
        config: the configuration that was used, applied suggestions included.
        diagnosis: of the run.

    Raises:
        StorageError: the disk refused a write.
    """
    earlier = read_advice(folder, kind)
    used = {f: _value(config, f) for f in APPLIED_FIELDS if _has(config, f)}
    before = earlier.tried if earlier else {}
    tried = {f: _with(before.get(f, ()), value) for f, value in used.items()}
    settings: dict[str, Setting] = {}
    if earlier is not None:
        settings = {f: v for f, v in earlier.settings.items() if used.get(f) == v}
    for finding in reversed(diagnosis.findings):  # the heaviest finding has the last word
        for field, value in finding.suggestions.items():
            if field in used and value not in tried[field]:
                settings[field] = value
    advice = Advice(
        settings=settings, tried=tried, summary=diagnosis.summary, diagnosed=datetime.now(UTC)
    )
    write_atomically(_path(folder, kind), advice.model_dump_json(indent=1))


def read_advice(folder: Path, kind: str) -> Advice | None:
    """What is kept for a kind of job; None where there is nothing that can be read."""
    try:
        return Advice.model_validate_json(_path(folder, kind).read_text())
    except FileNotFoundError:
        return None
    except ValidationError:
        LOGGER.warning("%s is no advice of this version and is not used", _path(folder, kind))
        return None


def with_suggestions(config: Config, folder: Path, kind: str) -> tuple[Config, tuple[str, ...]]:
    """The configuration with what the last diagnosis suggests, and a sentence for each change.

    A value that does not fit the rest of the configuration is left out, with a sentence too.
    """
    advice = read_advice(folder, kind)
    told: list[str] = []
    for field, value in sorted((advice.settings if advice else {}).items()):
        if field not in APPLIED_FIELDS or not _has(config, field):
            continue
        seen = _value(config, field)
        if seen == value or seen != _default(config, field):
            continue
        try:
            config = _changed(config, field, value)
        except ValidationError as exc:
            reason = exc.errors()[0]["msg"]
            told.append(f"{field} stays {seen}: {value} was suggested but does not fit ({reason})")
            continue
        told.append(f"{field} is {value} instead of {seen}: {advice.summary if advice else ''}")
    for sentence in told:
        LOGGER.info("from the last diagnosis: %s", sentence)
    return config, tuple(told)


def _path(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.json"


def _with(values: tuple[Setting, ...], value: Setting) -> tuple[Setting, ...]:
    return values if value in values else (*values, value)


def _leaf(config: BaseModel, field: str) -> tuple[BaseModel, str]:
    """The model that holds a dotted field, and the field's own name."""
    *parents, name = field.split(".")
    for parent in parents:
        config = getattr(config, parent)
    return config, name


def _has(config: BaseModel, field: str) -> bool:
    for part in field.split("."):
        if not isinstance(config, BaseModel) or part not in type(config).model_fields:
            return False
        config = getattr(config, part)
    return True


def _value(config: BaseModel, field: str) -> Setting:
    holder, name = _leaf(config, field)
    value: Setting = getattr(holder, name)
    return value


def _default(config: BaseModel, field: str) -> object:
    holder, name = _leaf(config, field)
    return type(holder).model_fields[name].get_default(call_default_factory=True)


def _changed(config: Config, field: str, value: Setting) -> Config:
    plain = config.model_dump()
    *parents, name = field.split(".")
    place = plain
    for parent in parents:
        place = place[parent]
    place[name] = value
    return type(config).model_validate(plain)


def _forget(plain: dict[str, object], path: list[str]) -> None:
    inner: Mapping[str, object] | object = plain
    for part in path[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(path[-1], None)
