"""What the room hands around: the state of a release, one look at it, and what was decided."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.release.config import ReleaseConfig, StepConfig

OPEN, RELEASED, ROLLED_BACK, SUPERSEDED = "open", "released", "rolled_back", "superseded"
State = Literal["open", "released", "rolled_back", "superseded"]
BY_ITSELF = "release flow"
"""Actor of what no person asked for."""
ByHand = Literal["promote", "hold", "resume", "roll_back"]
MetricName = Literal["errors", "latency", "scores", "task_paired", "task_split"]


class Action(StrEnum):
    """What a look, or a person, does with a release."""

    START = "start"
    HOLD = "hold"
    RESUME = "resume"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    SUPERSEDE = "supersede"


class Shares(BaseModel):
    """How the edge shares a model's requests."""

    model_config = ConfigDict(frozen=True)

    candidate: float = 0.0
    """Percent of requests."""
    mirror: float = 0.0
    """Percent of requests, as copies."""
    sticky: bool = False


class Wanted(BaseModel):
    """What the servers and the edge are to do for one model."""

    model_config = ConfigDict(frozen=True)

    stable: str
    candidate: str | None = None
    shadow: str | None = None
    shares: Shares = Shares()


class Period(BaseModel):
    """A stretch of time in which one step's shares held, half-open."""

    model_config = ConfigDict(frozen=True)

    step: int
    since: datetime
    until: datetime | None = None
    shares: Shares
    split: bool = True
    """Whether something could split the requests; else the candidate is alone in track `stable`."""


class Finding(BaseModel):
    """What one metric says of the candidate against the stable version, at any look.

    Attributes:
        log_evidence: natural logarithm of the e-value against "no worse".
        alpha: chance that it ever reaches `1 / alpha` if the candidate is no worse.
        estimate: of the quantity that `unit` names; None where nothing is known.
        low, high: bounds on it that hold at all times, each with probability `1 - alpha`.
        num: requests, events or units that were compared.
    """

    model_config = ConfigDict(frozen=True)

    metric: MetricName
    log_evidence: float = 0.0
    alpha: float
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    num: int = 0
    unit: str
    is_harm: bool = False
    sentence: str


class Tally(BaseModel):
    """Plain counts of one version in the release so far."""

    model_config = ConfigDict(frozen=True)

    num_requests: int = 0
    num_failed: int = 0
    num_labelled: int = 0
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    task_metric: float | None = None
    latency_histogram: tuple[int, ...] = ()
    score_histogram: tuple[int, ...] = ()


class Evidence(BaseModel):
    """All that one look saw."""

    model_config = ConfigDict(frozen=True)

    seen_until: datetime
    findings: tuple[Finding, ...] = ()
    stable: Tally = Tally()
    candidate: Tally = Tally()
    shadow: Tally = Tally()
    step_requests: int = 0
    """Requests of the candidate in this step, copies included."""
    num_labels: int = 0
    """Labelled rows of the candidate, copies included."""
    faults: tuple[str, ...] = ()
    """Sentences on what is broken for both versions now."""
    split_fault: str = ""
    label_fault: str = ""
    """Why no label could be read; what needs none was compared all the same."""

    def finding(self, metric: MetricName) -> Finding | None:
        """What one metric says."""
        return next((f for f in self.findings if f.metric == metric), None)

    @property
    def harms(self) -> tuple[Finding, ...]:
        """Findings that say that the candidate is worse."""
        return tuple(f for f in self.findings if f.is_harm)


class Decision(BaseModel):
    """What is to be done, and why."""

    model_config = ConfigDict(frozen=True)

    action: Action
    rule: str
    """Word for the rule that decided."""
    reason: str


class Release(BaseModel):
    """One release as the ledger has it."""

    model_config = ConfigDict(frozen=True)

    release_id: str
    model: str
    stable: str
    candidate: str
    state: State
    step: int
    step_since: datetime
    opened_at: datetime
    opened_by: str
    closed_at: datetime | None = None
    held_by: str = ""
    """Who holds it; empty where nobody does."""
    generation: int
    """Counts what was decided; a mover learns by it that something else was decided since."""
    moved: int
    """Generation whose traffic was set."""
    can_split: bool = True
    config: ReleaseConfig
    periods: tuple[Period, ...] = Field(default=())

    @property
    def is_open(self) -> bool:
        """True until it ends."""
        return self.state == OPEN

    @property
    def is_moved(self) -> bool:
        """True where the traffic was set as decided last."""
        return self.moved == self.generation

    @property
    def steps(self) -> tuple[StepConfig, ...]:
        """Steps that this release takes: only the last one where nothing splits requests."""
        return self.config.steps if self.can_split else self.config.steps[-1:]

    @property
    def current(self) -> StepConfig:
        """The step it is in."""
        return self.steps[self.step]

    @property
    def wanted(self) -> Wanted:
        """What servers and edge are to do for the release as it stands.

        The candidate stays loaded in its track from the first step on, so that a step is a change
        at the edge alone. Where nothing splits requests, it takes the track `stable`.
        """
        if self.state == RELEASED or (self.is_open and not self.can_split):
            return Wanted(stable=self.candidate)
        if not self.is_open:
            return Wanted(stable=self.stable)
        step = self.current
        return Wanted(
            stable=self.stable,
            candidate=self.candidate,
            shadow=self.candidate if step.mirror_percent else None,
            shares=Shares(
                candidate=step.candidate_percent,
                mirror=step.mirror_percent,
                sticky=self.config.sticky,
            ),
        )

    @property
    def title(self) -> str:
        """Release, for sentences."""
        return f"release of {self.model} version {self.candidate} (before: {self.stable})"


class Entry(BaseModel):
    """One line of a release's record."""

    model_config = ConfigDict(frozen=True)

    number: int
    release_id: str
    at: datetime
    actor: str
    action: Action
    rule: str
    reason: str
    step: int
    """Step before."""
    generation: int
    evidence: Evidence | None = None
