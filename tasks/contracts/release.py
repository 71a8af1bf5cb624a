"""Values about variants, versions, gates and the champion."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from tasks.contracts.base import Artifact, Contract, ModelVersionRef, retired
from tasks.contracts.conversion import (
    GoalResult,
    Signature,
    VariantLatency,
    VariantPrice,
    VariantThroughput,
    tabular_signature,
)
from tasks.contracts.data import AUC_NAME, R2_NAME, DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.evaluation import (
    Calibration,
    EvaluationReport,
    FitOutcome,
    Metric,
    StudentReport,
)
from tasks.contracts.training import ModelCompression, TrainedModel
from tasks.kernel.errors import DataContractError
from tasks.kernel.values import Described


class TrainingResult(Contract):
    """Result of `training`: a judged candidate in the registry, and what it was made from."""

    dataset: ValidatedDataset
    model: TrainedModel
    evaluation: EvaluationReport
    version: ModelVersionRef


class _Variant(Described):
    """Stored under the names of earlier versions, which are the first aliases: forms know these."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str = Field(description="Such as `onnx-fp32`.")
    format: str
    precision: str
    files: Artifact | None = Field(description="Folder of the variant; None where none was built.")
    settings: dict[str, str]
    """Opset, versions, threads, calibration: how it was built, or as read back."""
    provenance: dict[str, str] = Field(
        default={},
        validation_alias=AliasChoices("stamp", "provenance"),
        serialization_alias="stamp",
    )
    """In its files too; without it they are not loaded."""


class BuiltVariant(_Variant):
    """One variant as it was built, before anything judged it."""

    failure: str | None = Field(default=None, description="Why it could not be built.")


class TritonRepository(Contract):
    """Model repository from which Triton serves one variant."""

    files: Artifact = Field(description="Folder that Triton is started with.")
    model: str = Field(description="Name that clients ask for.")
    models: tuple[str, ...] = Field(description="All that is in it; more than one is an ensemble.")

    _retired = retired("schema_of")


class ModelVariant(_Variant):
    """One converted variant of a model, accepted or dropped, with the reason."""

    hardware_class: str
    source_sha256: str = Field(description="Digest of the program it was made from.")
    parity_max: float | None
    """Largest gap of a row: of its probability, in standard deviations of the label, or of
    embeddings 1 - cosine, or the change of their length."""
    parity_mean: float | None
    auc_change: Metric | None = None
    """Variant minus source on the test rows."""
    r2_change: Metric | None = Field(default=None, description="The same, of a regression.")
    metric: str = Field(default="", description="Name of the metric where it is another one.")
    metric_change: Metric | None = Field(default=None, description="The same, of that metric.")
    latencies: tuple[VariantLatency, ...]
    throughput: VariantThroughput | None = None
    price: VariantPrice | None = None
    num_bytes: NonNegativeInt
    load_ms: float | None
    accepted: bool = Field(
        validation_alias=AliasChoices("kept", "accepted"), serialization_alias="kept"
    )
    reason: str
    triton: TritonRepository | None = None
    """Serves it; None where none was asked for, or could be written."""
    standings: tuple[GoalResult, ...] = ()
    """One a goal: whether it serves it on this hardware, and why."""

    # Measured before 2026-11-25.
    _retired = retired("memory_bytes", "profile", "source_profile")

    @property
    def serves(self) -> tuple[str, ...]:
        """The goals that it was chosen for."""
        return tuple(standing.goal for standing in self.standings if standing.chosen)

    @property
    def quality_change(self) -> Metric | None:
        """Change of the metric that models are compared by."""
        return self.auc_change or self.r2_change or self.metric_change

    @property
    def quality_name(self) -> str:
        """The metric that models are compared by."""
        return self.metric or (AUC_NAME if self.r2_change is None else R2_NAME)


class ImportedModel(Contract):
    """Result of `model_import`: the version, and what became of each of its formats."""

    version: ModelVersionRef
    variants: tuple[ModelVariant, ...]


class RegisteredProgram(Described):
    """A registered model version whose program was fetched into the artifact store, verified."""

    version: ModelVersionRef
    program: Artifact
    columns: DatasetSchema | None = None
    """Raw columns; None where the program does not take a table."""
    family: str = Field(default="tabular", description="Kind of model, as conversion knows it.")
    signature: Signature = Field(description="Follows from `columns` where it is not given.")

    @model_validator(mode="before")
    @classmethod
    def _signature_of_columns(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("signature") is None:
            columns = values.get("columns")
            if columns is None:
                raise ValueError("a program needs its signature, or the columns that it follows of")
            return {**values, "signature": tabular_signature(DatasetSchema.model_validate(columns))}
        return values

    @property
    def raw_columns(self) -> DatasetSchema:
        """The raw columns of a program that takes a table.

        Raises:
            DataContractError: it takes something else.
        """
        if self.columns is None:
            raise DataContractError(
                f"{self.version.name} version {self.version.version} is of the family "
                f"{self.family!r} and takes no table of columns; name a tabular model"
            )
        return self.columns


class TrainedVersion(Contract):
    """A registered version that was trained here, and the rows that this was done on."""

    version: ModelVersionRef
    splits: DataSplits


class FiledVersion(TrainedVersion):
    """The same, with how it was judged and converted, as the registry keeps it."""

    evaluation: EvaluationReport
    variants: tuple[ModelVariant, ...]


class CompressionParent(Contract):
    """A registered version that a smaller network is to come from, as the registry knows it."""

    program: RegisteredProgram
    checkpoint: Artifact = Field(description="Weights of its network, and its preprocessing.")
    splits: DataSplits = Field(description="Rows that it was trained, chosen and judged on.")
    training_config: dict[str, object]


class CalibrationSource(CompressionParent):
    """A registered version whose scores are to be mapped again."""

    best_epoch: NonNegativeInt
    calibration: Calibration | None = None
    """Its own earlier map; None where its network speaks for itself."""


class GateResult(Contract):
    """One gate of a promotion."""

    name: Annotated[str, BeforeValidator(lambda n: "baseline-model" if n == "yardstick" else n)]
    """Decisions before 2026-11-26 hold `yardstick`."""
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

    @property
    def outcome(self) -> str:
        """What came of the question while the version is not the champion; follows its name."""
        until = f"{self.deadline:%Y-%m-%d %H:%M} UTC"
        return {
            "waiting": f"waits for a person's approval until {until}",
            "approved": f"was approved by {self.approver} and not moved",
            "rejected": f"was rejected by {self.approver}",
            "timed_out": f"was rejected: nobody answered before {until}",
        }[self.state]


class PromotionDecision(Described):
    """All gates of one promotion, and what was done."""

    candidate: ModelVersionRef
    previous_champion: int | None
    gates: tuple[GateResult, ...]
    promoted: bool
    approval: Approval | None = None
    """None where no person was asked: none required, or a gate closed."""

    @property
    def closed(self) -> list[str]:
        """Names of the gates that are closed."""
        return [gate.name for gate in self.gates if not gate.passed]


class ChampionState(Described):
    """The champion, how it came to be that, and whether the one before it could serve again."""

    version: ModelVersionRef
    promoted_at: datetime | None
    """When a promotion made it champion; None where that is not known, or where a roll back did."""
    previous: ModelVersionRef | None = Field(description="The champion before it.")
    previous_trouble: str | None
    """Why the previous one cannot serve: files that are missing or damaged."""
    asked_about: int | None = None
    """A later version whose promotion waits for a person's answer."""


class Rollback(Described):
    """One roll back: whose place was taken by which earlier champion, and why."""

    restored: ModelVersionRef
    replaced: ModelVersionRef
    reason: str
    order_id: str
    """The incident that asked for it; repeating it changes nothing"""
    at: datetime


class Withdrawal(Contract):
    """A version that must never serve again, why, and who is the champion now."""

    version: ModelVersionRef
    reason: str
    by: str = Field(description="Who says so, as told.")
    at: datetime
    champion: ModelVersionRef | None = Field(description="After it; None where nobody is left.")


class RecalibrationResult(Described):
    """Result of `recalibration`: a new version by a new map alone, or why there is none."""

    source: ModelVersionRef = Field(description="Version whose scores were mapped.")
    fit: FitOutcome
    refusal: str | None = Field(description="Why no version was registered; None where one was.")
    evaluation: EvaluationReport | None = None
    """On rows later than those of the fit; None without a map."""
    version: ModelVersionRef | None = None
    variants: tuple[ModelVariant, ...] = ()
    promotion: PromotionDecision | None = None


class CompressionResult(Contract):
    """Result of `model-compression`: a smaller version, or why there is none."""

    compression: ModelCompression
    hidden_sizes: tuple[PositiveInt, ...] = Field(description="Of the smaller network.")
    num_parameters: PositiveInt
    choice: str = Field(description="Which network is offered, and why that one.")
    judged: StudentReport
    evaluation: EvaluationReport | None = Field(default=None, description="None where refused.")
    version: ModelVersionRef | None = Field(default=None, description="None where refused.")
    variants: tuple[ModelVariant, ...] = ()
    promotion: PromotionDecision | None = None
