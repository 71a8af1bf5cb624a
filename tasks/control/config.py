"""What can be asked of the control of runs: leases, routing, recovery, retraining."""

from typing import Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from tasks.contracts.hardware import ClassName
from tasks.kernel.values import Described

URGENT, LOWEST = 1, 10
StageName = Literal["feature refresh", "training", "conversion", "promotion", "drift check"]


class LeaseRequest(Described):
    """Devices of one host that a piece of work needs at a time."""

    cores: NonNegativeInt = Field(default=0, le=4096, description="CPU cores, each for it alone.")
    gpus: NonNegativeInt = Field(default=0, le=64, description="GPUs, or slices of GPUs.")
    mig_profile: str | None = Field(
        default=None, pattern=r"^[0-9]+(c\.[0-9]+)?g\.[0-9]+gb([+.-][a-z.]+)?$"
    )
    """Slices of this profile, such as `1g.18gb`, instead of whole GPUs."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.cores and not self.gpus:
            raise ValueError("cores=0 and gpus=0 ask for nothing; ask for one of them at least")
        if not self.gpus and self.mig_profile:
            raise ValueError("mig_profile says which GPUs, but gpus=0; set gpus")
        if self.gpus > 1 and self.mig_profile:
            raise ValueError(
                f"gpus={self.gpus} slices {self.mig_profile}: CUDA shows a program one slice at a "
                "time; ask for one larger slice, or for a lease for each program"
            )
        return self

    def __str__(self) -> str:
        wanted = [f"{self.cores} core(s)"] if self.cores else []
        if self.gpus:
            kind = f"slice(s) {self.mig_profile}" if self.mig_profile else "GPU(s)"
            wanted.append(f"{self.gpus} {kind}")
        return " and ".join(wanted)


class StageLease(Described):
    """The devices that a stage holds while it works, and how it waits for them."""

    enabled: bool = True
    """Hold a lease. Not needed where something else gives each run devices of its own, as
    Kubernetes does."""
    request: LeaseRequest | None = None
    """What to hold; none: all cores that the process may use and, for training on `cuda`, all whole
    GPUs. Ask for less to let several trainings share a host."""
    priority: int = Field(default=3, ge=URGENT, le=LOWEST)
    """Place in the line; 1 is the most urgent."""
    wait_s: NonNegativeFloat | None = Field(default=None, le=2592000)
    """Longest wait in seconds; none: as long as it takes."""


class BurstRule(Described):
    """Another pool, mostly one that costs money by the hour, for when the own one is behind."""

    hardware_class: ClassName = Field(description="Class of its deployment and pool.")
    queue_longer_than: NonNegativeInt = Field(le=100_000)
    """Runs that wait in the own pool's queues, but for those with a limit or a pause; with one more
    the stage goes to the other pool, with fewer it stays again."""
    price_per_hour: NonNegativeFloat = Field(le=1e6)
    """What an hour of one run there costs; recorded with each run."""
    most_per_day: PositiveFloat = Field(le=1e9)
    """What its runs of the newest 24 hours may have cost, in the same money, those that wait there
    as the mean of the others; from there on the stage waits."""


class StageRouting(Described):
    """Which hardware one stage wants, and what happens while no worker there is online."""

    hardware_class: ClassName = "cpu"
    """Class that the stage wants, one of `hardware.yaml`: `cpu`, `gpu` or one of your own; the name
    of its deployment."""
    wait_s: NonNegativeFloat = Field(default=600, le=604_800)
    """Seconds to wait for a worker of a class before the next class in `fall_back` is taken, or the
    run fails; 0 does not wait."""
    fall_back: tuple[ClassName, ...] = Field(default=(), max_length=8)
    """Classes to take instead, in this order, after the wait; none: the run fails. Training that
    falls back to one of processors computes on the CPU."""

    burst: BurstRule | None = None
    """Where the stage goes while the own pool is behind; none: nowhere."""

    @model_validator(mode="after")
    def _each_class_once(self) -> Self:
        classes = (self.hardware_class, *self.fall_back)
        if len(set(classes)) < len(classes):
            raise ValueError(
                f"fall_back {list(self.fall_back)} names a class twice, or the wanted class "
                f"{self.hardware_class!r} itself; name each other class once"
            )
        return self


class RoutingConfig(Described):
    """Where each stage of the loop runs."""

    mode: Literal["auto", "in process", "deployments"] = "auto"
    """`auto` sends stages to work pools where the loop itself was started by a deployment, and runs
    them in its own process otherwise."""
    feature_refresh: StageRouting = StageRouting()
    training: StageRouting = StageRouting()
    conversion: StageRouting = StageRouting()
    promotion: StageRouting = StageRouting()
    drift_check: StageRouting = StageRouting()

    def of(self, stage: StageName) -> StageRouting:
        """The rule of one stage."""
        rule: StageRouting = getattr(self, stage.replace(" ", "_"))
        return rule

    @property
    def classes(self) -> tuple[str, ...]:
        """All hardware classes that a stage may go to, each once."""
        rules = [self.of(stage) for stage in get_args(StageName)]
        named = [name for rule in rules for name in (rule.hardware_class, *rule.fall_back)]
        named += [rule.burst.hardware_class for rule in rules if rule.burst]
        return tuple(dict.fromkeys(named))


class RecoveryConfig(Described):
    """Limits of the recovery sweep."""

    heartbeat_limit_s: float = Field(default=120, ge=60, le=86_400)
    """Seconds without a heartbeat after which a run on another host is lost; at least three times
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY."""
    second_look_s: float = Field(default=35, ge=1, le=600)
    """Seconds until a second look confirms what heartbeats or slot counts alone say; longer than
    one heartbeat, because a server that was away has heard of none."""
    max_retries: NonNegativeInt = Field(default=2, le=20)
    """How often one run that was cut off is started again."""
    retry_within_s: NonNegativeFloat = Field(default=3600, le=604_800)
    """Age in seconds beyond which a run that was cut off is left as it is."""

    @model_validator(mode="after")
    def _second_look_is_within_the_limit(self) -> Self:
        if self.second_look_s > self.heartbeat_limit_s:
            raise ValueError(
                f"second_look_s={self.second_look_s} is longer than heartbeat_limit_s="
                f"{self.heartbeat_limit_s}; make it shorter, or nothing is ever confirmed"
            )
        return self


class RetrainingPolicy(Described):
    """Bounds of the controller for one use case; kept with every result that it judges."""

    cool_down_hours: NonNegativeFloat = Field(default=6.0, le=24 * 90)
    """Hours after a retraining was claimed in which none of the same model is; no recalibration is
    either, nor in those after another recalibration."""
    retrain_again_days: float = Field(default=14.0, ge=1, le=365)
    """Days after a retraining that brought no new champion, when trouble that goes on may be
    retrained again: by then more of the new rows are there to learn from."""
    retrain_at_growth: float | None = Field(default=None, ge=1.1, le=100)
    """Retrain without any drift where the days to train on have grown by this factor since the
    champion's; where no champion came of it, again when a whole window of the drift check is new.
    Empty: only drift retrains."""
    max_runs_per_week: NonNegativeInt = Field(default=3, le=1000)
    """Retrainings of one model in any seven days; 0 means it is never retrained."""
    max_recalibrations_per_week: NonNegativeInt = Field(default=7, le=1000)
    """Recalibrations of one model in any seven days, which train nothing and so have a budget of
    their own; 0 means that the model is retrained instead."""
    max_run_hours_per_week: PositiveFloat | None = Field(default=None, le=24 * 7 * 100)
    """Hours that retrainings and recalibrations of one model may take in any seven days, as far as
    they are known; empty means no limit."""
    max_cost_per_month: NonNegativeFloat | None = Field(default=None, le=1e9)
    """Money that retrainings and recalibrations of one model may take in any 30 days, at the prices
    in `hardware.yaml`; with it reached none is started. Empty: no limit."""
    roll_back_within_days: NonNegativeFloat = Field(default=14.0, le=365)
    """Days after a promotion in which it may be taken back; 0 means never."""
    max_auc_loss: NonNegativeFloat = Field(default=0.04, le=0.5)
    """The ranking is intact where the AUC has for certain not lost more than this; then wrong
    scores ask for a new calibration only."""
