"""Values about variants, versions, gates and the champion."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import Artifact, Contract, ModelVersionRef
from tasks.contracts.calibration import Calibration, FitOutcome
from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport, Metric
from tasks.contracts.training import TrainedModel


class VariantLatency(Contract):
    """Latency of one variant at one batch size, one thread, against PyTorch eager beside it."""

    batch_rows: PositiveInt
    p50_ms: float
    p95_ms: float
    ratio_to_eager: float = Field(description="Median of paired ratios; below 1 is faster.")
    ratio_to_replaced: float | None = Field(
        default=None, description="Against the simpler variant it would replace, paired."
    )


class TrainingResult(Contract):
    """Result of `training`: a judged candidate in the registry, and what it was made from."""

    dataset: ValidatedDataset
    model: TrainedModel
    evaluation: EvaluationReport
    version: ModelVersionRef


class BuiltVariant(Contract):
    """One converted form as it was built, before anything judged it."""

    name: str = Field(description="Such as `onnx-fp32`.")
    format: str
    precision: str
    files: Artifact | None = Field(description="Folder of the variant; None where none was built.")
    failure: str | None = Field(default=None, description="Why it could not be built.")
    settings: dict[str, str] = Field(description="Opset, versions, calibration: how it was built.")


class ModelVariant(Contract):
    """One converted form of a model, kept or dropped, with the reason."""

    name: str = Field(description="Such as `onnx-fp32`.")
    format: str
    precision: str
    hardware_class: str
    files: Artifact | None = Field(description="Folder of the variant; None where none was built.")
    source_sha256: str = Field(description="Digest of the program it was made from.")
    parity_max: float | None = Field(
        description="Largest gap of a score: a probability, or in standard deviations of the label."
    )
    parity_mean: float | None
    auc_change: Metric | None = Field(description="Variant minus source on the test rows.")
    r2_change: Metric | None = Field(default=None, description="The same, of a regression.")
    latencies: tuple[VariantLatency, ...]
    num_bytes: NonNegativeInt
    load_ms: float | None
    kept: bool
    reason: str
    settings: dict[str, str] = Field(
        description="Precision, threads, runtime version, as read back."
    )

    @property
    def quality_change(self) -> Metric | None:
        """Change of the metric that models are compared by."""
        return self.auc_change if self.r2_change is None else self.r2_change


class RegisteredProgram(Contract):
    """A registered model version whose program was fetched into the artifact store, verified."""

    version: ModelVersionRef
    program: Artifact
    columns: DatasetSchema


class CalibrationSource(Contract):
    """A registered version whose scores are to be mapped anew, as far as the registry knows it."""

    program: RegisteredProgram
    checkpoint: Artifact = Field(description="Weights of its network.")
    splits: DataSplits = Field(description="Rows that it was trained, chosen and judged on.")
    training_config: dict[str, object]
    best_epoch: NonNegativeInt
    calibration: Calibration | None = Field(
        default=None, description="Its own earlier map; None where its network speaks for itself."
    )


class GateResult(Contract):
    """One gate of a promotion."""

    name: str
    passed: bool
    evidence: str


class Approval(Contract):
    """What a person said about a candidate, or that nobody has said anything yet."""

    state: Literal["waiting", "approved", "rejected", "timed_out"]
    asked: datetime
    deadline: datetime = Field(description="Moment from which no answer means no.")
    approver: str | None = Field(default=None, description="As told; None where nobody answered.")
    comment: str = ""
    answered: datetime | None = None


class PromotionDecision(Contract):
    """All gates of one promotion, and what was done."""

    candidate: ModelVersionRef
    previous_champion: int | None
    gates: tuple[GateResult, ...]
    promoted: bool
    approval: Approval | None = Field(
        default=None, description="None where no person was asked: none required, or a gate closed."
    )


class ChampionStanding(Contract):
    """The champion, how it came to be that, and whether the one before it could serve again."""

    version: ModelVersionRef
    promoted_at: datetime | None = Field(
        description="When a promotion made it champion; None where that is not known, or where a "
        "roll back did."
    )
    former: ModelVersionRef | None = Field(description="The champion before it.")
    former_trouble: str | None = Field(
        description="Why the former cannot serve: files that are missing or damaged."
    )


class Rollback(Contract):
    """One roll back: whose place was taken by which earlier champion, and why."""

    restored: ModelVersionRef
    replaced: ModelVersionRef
    reason: str
    order_id: str = Field(description="The episode that asked for it; repeating it changes nothing")
    at: datetime


class RecalibrationResult(Contract):
    """Result of `recalibration`: a new version by a new map alone, or why there is none."""

    source: ModelVersionRef = Field(description="Version whose scores were mapped.")
    fit: FitOutcome
    refusal: str | None = Field(description="Why no version was registered; None where one was.")
    evaluation: EvaluationReport | None = Field(
        default=None, description="On rows later than those of the fit; None without a map."
    )
    version: ModelVersionRef | None = None
    variants: tuple[ModelVariant, ...] = ()
    promotion: PromotionDecision | None = None
