"""Values about a replayed history: what each policy did, what it gained, and what it cost."""

from datetime import date, datetime
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from tasks.contracts.base import Artifact, Contract, TimeWindow
from tasks.contracts.data import DataSplits
from tasks.contracts.evaluation import Metric
from tasks.contracts.telemetry import ResourceUse
from tasks.kernel.values import Described

PolicyName = Literal["never", "weekly", "monthly", "on-drift-alarm", "controller", "oracle"]
FaultKind = Literal[
    "celsius", "scale", "freeze", "timezone", "labels-flipped", "category-split", "station-missing"
]


class ReplayedModel(Contract):
    """One model that was made in a replay, whichever policies asked for it."""

    number: PositiveInt = Field(description="Rises with the moments; even of a recalibration.")
    made: datetime = Field(description="On the virtual clock.")
    kind: Literal["training", "recalibration"]
    splits: DataSplits
    program_sha256: str
    quality: Metric | None = Field(description="AUC or R2 on its own test window.")
    use: ResourceUse = Field(description="What making and judging it took, once.")


class ReplayedAct(Contract):
    """One thing that a policy did, or was kept from, on one day."""

    at: datetime
    action: Literal["retrain", "recalibrate", "roll_back", "alert", "wait"]
    reason: str
    model: int | None = Field(default=None, description="Number of the model that was made.")
    promoted: bool = False
    closed: tuple[str, ...] = Field(default=(), description="Gates that refused the model.")


class Reign(Contract):
    """The days on which one model served under a policy."""

    window: TimeWindow
    model: PositiveInt


class PolicyQuality(Described):
    """Quality of what a policy served in one part of the history."""

    window: TimeWindow
    quality: Metric = Field(description="AUC or R2 of all rows, as they were served.")
    to_never: Metric = Field(description="Minus that of `never`, on the same draws of days.")
    to_monthly: Metric = Field(description="Minus that of `monthly`.")
    to_controller: Metric = Field(description="Minus that of `controller`.")
    regret: Metric = Field(description="That of `oracle` minus this.")
    num_trainings: NonNegativeInt
    training_cpu_s: NonNegativeFloat = Field(default=0.0, description="CPU seconds of trainings.")
    use: ResourceUse = Field(description="Of trainings, recalibrations and checks in this part.")
    gain_per_cpu_hour: Metric | None
    """Gain over `never` by CPU hour; None where nothing was spent."""


class WeekQuality(Contract):
    """Quality in one week, as one point of a picture."""

    start: date
    quality: float | None = Field(description="None where labels of the week are too few.")


class PolicyResult(Contract):
    """What one policy did in the replay."""

    policy: PolicyName
    reigns: tuple[Reign, ...]
    acts: tuple[ReplayedAct, ...]
    tuned_on: PolicyQuality
    held_out: PolicyQuality
    weeks: tuple[WeekQuality, ...]

    @property
    def num_promoted(self) -> int:
        """Models that came into service."""
        return sum(act.promoted for act in self.acts)


class Sighting(Contract):
    """One part of the system that noticed something on a day."""

    at: datetime = Field(description="When the check ran, on the virtual clock.")
    by: Literal["validation of rows", "validation of features", "monitoring", "drift check"]
    sentence: str
    names_cause: bool = Field(description="It names the table or column that is broken.")


class FaultResult(Described):
    """What became of one injected fault."""

    fault: str = Field(description="As it was asked for, such as `celsius@07-10`.")
    kind: FaultKind
    described: str = Field(description="What was changed, in a sentence: table, columns, rows.")
    start: datetime
    end: datetime | None = Field(description="None where it stays.")
    size: NonNegativeFloat | None
    """Mean change of the changed values, in standard deviations of the column; None where it is no
    change of numbers."""
    sightings: tuple[Sighting, ...]
    """The first of each part of the system, of what the undisturbed history lacks."""
    asked: bool = True
    """False where the controller was not: rows were refused at once, or nothing served yet."""
    answer: Literal["rows refused", "alert", "nothing", "recalibrate", "retrain", "roll back"]
    verdict: Literal["right", "late", "missed", "wrong"]
    """wrong: a model was retrained that, or when, none is without the fault. late: noticed after
    more than a day."""

    @property
    def noticed(self) -> datetime | None:
        """When anything noticed it first."""
        return min((s.at for s in self.sightings), default=None)

    @property
    def named(self) -> datetime | None:
        """When its table or column was first named."""
        return min((s.at for s in self.sightings if s.names_cause), default=None)


class FalseAlarms(Contract):
    """What the undisturbed history raised, where nothing is broken."""

    num_days: PositiveInt
    refused: NonNegativeInt = Field(description="Weeks of a raw table that were refused.")
    alerts: NonNegativeInt = Field(description="Days with an alert of the monitoring.")
    data_faults: NonNegativeInt = Field(description="Days on which the drift check saw a fault.")
    sentences: tuple[str, ...] = Field(description="The first of each kind.")


class PermutedYears(Contract):
    """Histories with the days in a random order, where nothing drifts."""

    num_years: NonNegativeFloat = Field(description="Length of all of them together, in years.")
    retrainings: NonNegativeInt
    recalibrations: NonNegativeInt
    drift_alarm_retrainings: NonNegativeInt = Field(description="Those of `on-drift-alarm`.")


class Proposal(Described):
    """A change of configuration that the early days propose and the later ones judge."""

    num_tried: PositiveInt = Field(description="Configurations, the present one included.")
    field: str | None = Field(default=None, description="Such as `clock.test_days`; None: nothing.")
    present: float | None = None
    proposed: float | None = None
    gain: Metric | None = Field(default=None, description="AUC or R2 on the days that judge.")
    trainings: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """On the days that judge: as it is, and as proposed."""
    holds: bool = Field(default=False, description="It is better on the days that judge too.")
    sentence: str


class ReplayResult(Described):
    """A whole replay; the page shows it and `replay.json` holds it."""

    use_case: str
    question: str
    quality_name: str = Field(description="AUC or R2.")
    history: TimeWindow
    tuned_on: TimeWindow = Field(description="Days on which bounds may be chosen.")
    held_out: TimeWindow = Field(description="Days that judge.")
    seed: NonNegativeInt
    policies: tuple[PolicyResult, ...]
    models: tuple[ReplayedModel, ...]
    false_alarms: FalseAlarms
    faults: tuple[FaultResult, ...] = ()
    permuted: PermutedYears | None = None
    proposal: Proposal | None = None
    recommended: PolicyName
    sentence: str = Field(description="Which policy this use case should run, and why.")
    scores: Artifact
    """Parquet: row id, event time, label, and the score that each policy served."""
    event_time: str = Field(default="event_timestamp", description="Columns of that file.")
    label: str = "label"

    def of(self, policy: PolicyName) -> PolicyResult:
        """The result of one policy."""
        return next(result for result in self.policies if result.policy == policy)
