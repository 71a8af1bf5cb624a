"""Better bounds for the controller, found on early days and judged on later ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from flows.config import PipelineConfig
from flows.replay.history import History
from flows.replay.outcome import ENOUGH, minus, quality_of, spent_in
from flows.replay.walk import Walk
from tasks.contracts.base import TimeWindow
from tasks.contracts.replay import Proposal

SPACE: Mapping[str, tuple[Any, ...]] = {
    "clock.test_days": (7, 14),
    "clock.validation_days": (7, 14),
    "clock.drift_days": (14, 42),
    "drift.min_auc_drop": (0.01, 0.03),
    "drift.min_skill_drop": (0.02, 0.1),
    "retraining.max_auc_loss": (0.01, 0.08),
    "retraining.retrain_again_days": (7.0, 28.0),
    "retraining.retrain_at_growth": (1.25, 1.5, 2.0),
}
"""Fields of a use case, and values that are tried beside its own, one field at a time."""


@dataclass(frozen=True)
class Tried:
    """One configuration, its walk over the early days, and how good that was."""

    field: str
    value: Any
    quality: float
    num_trainings: int


def with_field(config: PipelineConfig, field: str, value: Any) -> PipelineConfig:
    """The use case with another value of one field, written as `part.name`."""
    part, name = field.split(".")
    return config.model_copy(update={part: getattr(config, part).model_copy(update={name: value})})


def _changed(history: History, field: str, value: Any) -> History:
    """The same with another value; how far back models are scored may depend on it."""
    return replace(history, config=with_field(history.config, field, value), in_memory={})


def of_task(history: History) -> dict[str, tuple[Any, ...]]:
    """The fields that matter to the use case's kind of task, without the values it has."""
    other = {"drift.min_skill_drop"}
    if history.columns.task != "classification":
        other = {"drift.min_auc_drop", "retraining.max_auc_loss"}
    return {
        field: tuple(v for v in values if v != attrgetter(field)(history.config))
        for field, values in SPACE.items()
        if field not in other
    }


def tune(
    history: History,
    own: Walk,
    tuned_on: TimeWindow,
    held_out: TimeWindow,
    walked: Callable[[History, TimeWindow], Walk],
) -> Proposal:
    """Try one field after the other on the early days; judge the best on the later ones.

    Args:
        history: rows, and the use case as it is.
        own: walk of the controller over all days.
        tuned_on: days that choose. Nothing later is looked at before the choice is made.
        held_out: days that judge.
        walked: walks the controller through a history up to the end of a window.
    """
    base = Tried("", None, _quality(history, own, tuned_on), _trainings(own, tuned_on))
    tried = [base]
    for field, values in of_task(history).items():
        for value in values:
            changed = _changed(history, field, value)
            walk = walked(changed, tuned_on)
            quality, trainings = _quality(changed, walk, tuned_on), _trainings(walk, tuned_on)
            tried.append(Tried(field, value, quality, trainings))
    best = chosen(tried)
    if best is base:
        none = f"None of {len(tried) - 1} changes was better on the early days: leave all as it is."
        return Proposal(num_tried=len(tried), sentence=none)
    changed = _changed(history, best.field, best.value)
    walk = walked(changed, TimeWindow(start=tuned_on.start, end=held_out.end))
    gain = minus(quality_of(changed, walk, held_out), quality_of(history, own, held_out))
    present = attrgetter(best.field)(history.config)
    before, after = _trainings(own, held_out), _trainings(walk, held_out)
    holds = gain.value >= ENOUGH or (gain.value >= -ENOUGH and after < before)
    return Proposal(
        num_tried=len(tried),
        field=best.field,
        present=present,
        proposed=best.value,
        gain=gain,
        trainings=(before, after),
        holds=holds,
        sentence=(
            f"`{best.field}`: {present} to {best.value} was best of {len(tried)} on the early "
            f"days. On the days that judge it changes the quality by {gain:+.4f} and the trainings "
            f"from {before} to {after}: "
            f"{'take it over' if holds else 'leave it as it is'}."
        ),
    )


def chosen(tried: list[Tried]) -> Tried:
    """The best quality; among those within what nobody would pay for the fewest trainings."""
    best = max(each.quality for each in tried)
    good = [each for each in tried if each.quality >= best - ENOUGH]
    return min(good, key=lambda each: each.num_trainings)


def _quality(history: History, walk: Walk, window: TimeWindow) -> float:
    return quality_of(history, walk, window, replicates=False)[0]


def _trainings(walk: Walk, window: TimeWindow) -> int:
    return sum(spending.training for spending in spent_in(walk, window))
