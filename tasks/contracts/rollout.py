"""What a step-by-step release saw and decided: handed from the release room to its page."""

from datetime import datetime
from enum import StrEnum
from typing import Literal

from tasks.kernel.values import Frozen

State = Literal["open", "released", "rolled_back", "superseded"]
MetricName = Literal["errors", "latency", "scores", "task_paired", "task_split"]


class Action(StrEnum):
    """What an evaluation cycle, or a person, does with a release."""

    START = "start"
    HOLD = "hold"
    RESUME = "resume"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    SUPERSEDE = "supersede"


class Shares(Frozen):
    """How the gateway shares a model's requests."""

    candidate: float = 0.0
    """Percent of requests."""
    mirror: float = 0.0
    """Percent of requests, as copies."""
    sticky: bool = False


class Period(Frozen):
    """A stretch of time in which one step's shares held, half-open."""

    step: int
    since: datetime
    until: datetime | None = None
    shares: Shares
    split: bool = True
    """Whether something could split the requests; else the candidate is alone in track `stable`."""

    @property
    def is_split(self) -> bool:
        """Whether both versions answered requests of their own."""
        return self.split and 0 < self.shares.candidate < 100


class Finding(Frozen):
    """What one metric says of the candidate against the stable version, at any moment.

    Attributes:
        log_evidence: natural logarithm of the e-value against "no worse".
        alpha: chance that it ever reaches `1 / alpha` if the candidate is no worse.
        estimate: of the quantity that `unit` names; None where nothing is known.
        low, high: bounds on it that hold at all times, each with probability `1 - alpha`.
        num: requests, events or units that were compared.
    """

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


class Tally(Frozen):
    """Plain counts of one version in the release so far."""

    num_requests: int = 0
    num_failed: int = 0
    num_labelled: int = 0
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    task_metric: float | None = None


class Evidence(Frozen):
    """All that one evaluation cycle saw."""

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
    """What is broken for both versions now."""
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


class Entry(Frozen):
    """One line of a release's record."""

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


class ReleaseState(Frozen):
    """What was decided of a release so far."""

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
    can_split: bool = True
    periods: tuple[Period, ...] = ()

    @property
    def title(self) -> str:
        """Release, for messages."""
        return f"release of {self.model} version {self.candidate} (before: {self.stable})"


class ReleaseSummary(ReleaseState):
    """A release as its page shows it."""

    step_names: tuple[str, ...]
    is_moved: bool
    is_ranking: bool
    """Whether the task metric is an AUC."""
    chance: float
    """To roll back a version that is no worse."""
    split_alpha: float
