"""Values about a trained model, and about a search for better settings."""

from typing import Literal

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import Artifact, Contract, ModelVersionRef, TimeWindow, retired
from tasks.contracts.data import AUC_NAME, R2_NAME, DatasetSchema, DataSplits, TaskKind
from tasks.contracts.evaluation import Calibration, ScoredWindow
from tasks.contracts.telemetry import TrainingTelemetry
from tasks.kernel.values import Described


class EpochMetrics(Described):
    """One epoch of training; losses are means over the rows of all ranks.

    Of classes cross-entropy in nats, of a regression the Huber loss of the
    standardised label.
    """

    epoch: NonNegativeInt
    train_loss: float
    validation_loss: float
    validation_auc: float | None = None
    """Of a classification; mean of each class against the rest."""
    validation_r2: float | None = None
    """Of a regression: share of the label's variance explained."""
    learning_rate: float
    seconds: float
    rows_per_s: float

    @property
    def quality(self) -> float:
        """What epochs and trials are compared by; more is better. NaN where it is not known."""
        known = self.validation_auc if self.validation_r2 is None else self.validation_r2
        return float("nan") if known is None else known

    @property
    def quality_name(self) -> str:
        """Its name, for people."""
        return AUC_NAME if self.validation_r2 is None else R2_NAME


class StartingPoint(Contract):
    """A registered version whose weights a training may begin with."""

    version: ModelVersionRef
    checkpoint: Artifact = Field(description="Its best epoch, with its fitted preprocessing.")
    columns: DatasetSchema
    trained_on: TimeWindow


class DistillationTargets(Described):
    """What a network learns from another one besides the labels (Hinton, Vinyals, Dean, 2015)."""

    scores: ScoredWindow = Field(description="The teacher's scores of the training rows.")
    weight: float = Field(gt=0, le=1, description="Share of the loss that the scores have.")
    temperature: float = Field(ge=1)
    """Logits of both are divided by it; of a classification alone."""


class CandidateModel(Described):
    """What can be judged and registered: a program, the network in it, and the rows it has seen."""

    program: Artifact
    """`torch.export` program (.pt2), preprocessing inside: takes `categorical` int32 (rows, c) and
    `numeric` float32 (rows, n), gives `score` float32 (rows,), of several classes (rows,
    classes)."""
    checkpoint: Artifact
    """Plain state dict of what the best epoch was judged with: the mean of weights."""
    columns: DatasetSchema
    config: dict[str, object] = Field(description="The training configuration, whole.")
    snapshot_sha256: str
    splits: DataSplits
    best_epoch: NonNegativeInt
    started_from: StartingPoint | None = None
    """Whose weights it began with; None for none."""

    @property
    def kind(self) -> str:
        """The training's `model`: `network`, as ever before there were others, or another one."""
        return str(self.config.get("model", "network"))


class TrainedModel(CandidateModel):
    """The best epoch of a training run."""

    log: Artifact = Field(description="Full log of all ranks.")
    epochs: tuple[EpochMetrics, ...]
    num_ranks: PositiveInt
    strategy: str = Field(description="Engine that exchanged the gradients, such as `horovod`.")
    num_parameters: PositiveInt
    seconds: float
    energy_j: float | None = Field(default=None, description="Joules, None where not measurable.")
    launch: str = Field(default="", description="Ranks and threads, and why so many.")
    telemetry: TrainingTelemetry | None = None
    kept: tuple[Artifact, ...] = ()
    """What else the run left: traces of a profile, the story of elastic ranks."""

    _retired = retired("reading")


class RecalibratedModel(CandidateModel):
    """A registered version's network with another map of its scores; nothing was trained.

    Its validation window is that of the rows to which the map was fitted.
    """

    calibration: Calibration


CompressionMethod = Literal["pruning", "distillation", "pruning-distillation"]


class ModelCompression(Described):
    """How a smaller network came from a registered version."""

    parent: ModelVersionRef = Field(description="Version whose network was made smaller.")
    method: CompressionMethod
    settings: dict[str, object] = Field(description="What was asked for, whole.")
    parent_sizes: tuple[PositiveInt, ...] = Field(description="Hidden layers of the parent.")
    parent_parameters: PositiveInt = Field(description="Of its network.")
    is_distilled: bool = Field(validation_alias=AliasChoices("is_distilled", "is_taught"))
    """Whether the parent's scores were part of the loss."""


class CompressedModel(TrainedModel):
    """A smaller network trained from a registered version: pruned, distilled from it, or both."""

    compression: ModelCompression


class SearchedField(Contract):
    """One dimension of a search: a field of the training configuration and what it may be."""

    name: str
    low: float | None = Field(default=None, description="Bounds of a number, both included.")
    high: float | None = None
    log: bool = False
    choices: tuple[str, ...] = Field(default=(), description="JSON of each value of a choice.")


class TrialRecord(Contract):
    """One trial of a search, as its study keeps it."""

    number: NonNegativeInt
    state: Literal["complete", "pruned", "failed"]
    point: dict[str, float | int | str] = Field(description="Field to value; a choice is its JSON.")
    auc: float | None = Field(description="Best validation AUC; None where no epoch was finished.")
    r2: float | None = Field(default=None, description="Best validation R2, of a regression.")
    epochs: tuple[EpochMetrics, ...]
    seconds: float = Field(description="Training seconds; 0 for what was found trained already.")
    reason: str = Field(default="", description="Why it was pruned or failed.")
    attempts: PositiveInt = Field(default=1, description="More than 1 where it was taken up again.")

    _retired = retired("repeats")

    @property
    def quality(self) -> float | None:
        """What trials are compared by; more is better."""
        return self.auc if self.r2 is None else self.r2

    @property
    def quality_name(self) -> str:
        """Its name, for people."""
        return AUC_NAME if self.r2 is None else R2_NAME


class StudyRecord(Described):
    """A search as far as it has come: its space, its trials, and what they show."""

    study: str = Field(description="Name of the study; ends in a digest of data, space and code.")
    use_case: str
    task: TaskKind = "classification"
    fields: tuple[SearchedField, ...]
    trials: tuple[TrialRecord, ...]
    best: NonNegativeInt | None = Field(description="Number of the best complete trial.")
    importance: dict[str, float]
    """Field to its share of the variance of AUC or R2 over the space (fANOVA); empty where there
    are too few complete trials to say."""
    sampler: str
    pruner: str
    storage: Literal["sqlite", "postgresql"]
    max_epochs: PositiveInt
    ended_because: str = Field(description="Why no further trial was started.")

    @property
    def quality_name(self) -> str:
        """What trials are compared by, for people."""
        return R2_NAME if self.task == "regression" else AUC_NAME


class SearchResult(Described):
    """Result of `search`: the study, and the best trial's model, ready to be judged."""

    study: StudyRecord
    model: TrainedModel
    page: str = Field(description="Path of the page below the state folder.")
    version: ModelVersionRef | None = None
    """The registered candidate; None where none was asked for."""
