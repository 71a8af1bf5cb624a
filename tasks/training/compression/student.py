"""A smaller network before and after its training, and which of two twins is offered."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts.base import Contract
from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.training import Lesson, Shrinking, ShrunkModel, StartingPoint, TrainedModel
from tasks.training.compression.config import ShrinkingConfig
from tasks.training.config import TrainingConfig


class StudentPlan(Contract):
    """A smaller network before it is trained."""

    shrinking: Shrinking
    config: TrainingConfig
    initial: StartingPoint | None
    """What pruning left; None for a network that begins from scratch."""


def lesson_of(answers: ScoredWindow, config: ShrinkingConfig) -> Lesson:
    """The parent's answers as a lesson."""
    return Lesson(answers=answers, weight=config.teacher_weight, temperature=config.temperature)


@dataclass(frozen=True)
class Choice:
    """The network that is offered, and why that one."""

    model: ShrunkModel
    reason: str


def chosen(shrinking: Shrinking, taught: TrainedModel | None, untaught: TrainedModel) -> Choice:
    """The better of the taught network and its twin, by the validation rows.

    Not by the test rows: those judge what was chosen. Where both are as good, the simpler way.

    Args:
        shrinking: how they were made.
        taught: learnt from labels and the parent's answers; None where nobody taught.
        untaught: the same from labels alone.
    """
    if taught is None:
        return Choice(_shrunk(untaught, shrinking, is_taught=False), "there was no teacher")
    ours, alone = (model.epochs[model.best_epoch] for model in (taught, untaught))
    is_better = ours.quality > alone.quality
    told = (
        f"on the validation rows the taught network has {ours.quality_name} {ours.quality:.4f}, "
        f"the one without a teacher {alone.quality:.4f}; the "
        f"{'taught one' if is_better else 'one without'} is offered"
    )
    return Choice(_shrunk(taught if is_better else untaught, shrinking, is_taught=is_better), told)


def _shrunk(model: TrainedModel, shrinking: Shrinking, *, is_taught: bool) -> ShrunkModel:
    made = shrinking.model_copy(update={"is_taught": is_taught})
    return ShrunkModel.model_validate({**model.model_dump(), "shrinking": made.model_dump()})
