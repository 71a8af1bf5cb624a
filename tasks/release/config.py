"""How a new version takes over: in which steps, on what evidence, and when it goes back."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, model_validator

from tasks.contracts.data import TaskKind
from tasks.kernel.values import Described

Task = Literal["auc", "absolute_error"]
STORED = "stored"
"""Context in which the steps of a release are read that an earlier version began: they stand."""


class StepConfig(Described):
    """One step of a release: how traffic is shared, and what ends the step."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$", description="Name, for people.")
    candidate_percent: float = Field(ge=0, le=100)
    """Share of requests that the candidate answers, percent."""
    mirror_percent: float = Field(default=0, ge=0, le=100)
    """Share of requests that the candidate gets a copy of, percent; clients never see those
    answers. Pairs of answers to the same request say most about quality."""
    min_requests: int = Field(default=500, ge=0, le=10**9)
    """Requests that the candidate must have answered in the step, copies included."""
    min_minutes: float = Field(default=10, ge=0, le=60 * 24 * 90)
    """Minutes that the step lasts at least."""
    max_minutes: float = Field(default=60 * 24 * 7, gt=0, le=60 * 24 * 365)
    """Minutes after which a step that has not ended waits for a person."""
    min_labels: int = Field(default=0, ge=0, le=10**9)
    """Labelled requests of the candidate, of all steps, without which the step does not end; 0
    where labels come too late to wait for."""

    @model_validator(mode="after")
    def _can_end(self, info: ValidationInfo) -> Self:
        if info.context == STORED:
            return self
        if self.min_minutes >= self.max_minutes:
            raise ValueError(
                f"step {self.name}: min_minutes={self.min_minutes:g} is not below "
                f"max_minutes={self.max_minutes:g}, so it would never end well"
            )
        if self.candidate_percent == 0 and self.mirror_percent == 0:
            raise ValueError(
                f"step {self.name}: the candidate gets neither requests nor copies, so nothing "
                "would be learned; set candidate_percent or mirror_percent"
            )
        if self.candidate_percent and self.mirror_percent:
            raise ValueError(
                f"step {self.name}: the candidate gets requests or copies, not both; make a step "
                "of each"
            )
        return self


STEPS = (
    StepConfig(name="shadow", candidate_percent=0, mirror_percent=100),
    StepConfig(name="canary-5", candidate_percent=5),
    StepConfig(name="canary-25", candidate_percent=25),
    StepConfig(name="half", candidate_percent=50),
    StepConfig(name="all", candidate_percent=100, min_minutes=30),
)


class Alpha(NamedTuple):
    """How the chance to roll back a version that is no worse is spent; the sum, 5 %, bounds it."""

    task_paired: float = 0.02
    """Task metric, both versions on the same requests."""
    task_split: float = 0.005
    """Task metric, each version on its own requests."""
    errors: float = 0.01
    latency: float = 0.01
    scores: float = 0.005


ALPHA = Alpha()
SPLIT_ALPHA = 0.001
"""Chance to hold a release because the split looks wrong, and is not."""
TOLERATED_ERROR_RATIO, TOLERATED_SLOW_RATIO = 1.1, 1.25
"""The candidate may fail, or be slow, so many times as often."""


class ReleaseConfig(Described):
    """How a champion's traffic goes from the version before to it."""

    enabled: bool = True
    """A new champion gets its traffic step by step, where a server runs; else it waits until a
    person starts the release."""
    steps: tuple[StepConfig, ...] = Field(default=STEPS, min_length=1, max_length=20)
    """In this order."""
    sticky: bool = True
    """A client keeps its version while the shares stay; each counts once then."""
    task: Task | None = None
    """What labels are compared by: `auc` of a classification,
    `absolute_error` of a regression, and, of several classes, of the true
    class's probability. Empty: by the kind of the use case's label."""
    max_score_shift: float = Field(default=0.25, gt=0, le=1)
    """Largest gap between the two distributions of scores (Kolmogorov and Smirnov); a better model
    has other scores too, so only a large one is harm."""
    settle_s: float = Field(default=30, ge=0, le=3600)
    """Seconds after a change of traffic that are not counted,
    and for which the log is waited for."""

    @property
    def ranks(self) -> bool:
        """Whether labels are compared by the ranking of scores, not by their errors."""
        return self.task != "absolute_error"

    def of_label(self, kind: TaskKind) -> ReleaseConfig:
        """The same, the task metric chosen by the kind of the label where it is left open."""
        task: Task = "auc" if kind == "classification" else "absolute_error"
        return self.model_copy(update={"task": self.task or task})

    @model_validator(mode="after")
    def _steps_lead_to_all(self) -> Self:
        shares = [step.candidate_percent for step in self.steps]
        if shares != sorted(shares) or shares[-1] != 100:
            raise ValueError(
                f"release.steps give the candidate {', '.join(f'{s:g}' for s in shares)} percent; "
                "expected shares that never fall and end with 100"
            )
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError("release.steps: two steps have the same name; each needs its own")
        return self
