"""Values kept beside a registered model: what its folder holds, by digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from tasks.contracts.base import Contract, ModelVersionRef, TimeWindow
from tasks.contracts.calibration import Calibration
from tasks.contracts.conversion import (
    ImportedProgram,
    Signature,
    TensorSpec,
    tabular_signature,
)
from tasks.contracts.data import DatasetSchema, DataSplits, FeatureSnapshot, SnapshotPins
from tasks.contracts.evaluation import Comparison, EvaluationReport, Quality
from tasks.contracts.release import ModelVariant
from tasks.contracts.training import (
    CandidateModel,
    RecalibratedModel,
    Shrinking,
    ShrunkModel,
    StartingPoint,
)

MANIFEST_FILE = "model.json"
VARIANTS_FILE = "variants.json"
PROGRAM_FILE = "program.pt2"
EVALUATION_FILE = "evaluation.json"
CATEGORY_CODE_RULE = (
    "CRC-32 (zlib) of the string's UTF-8 bytes, bitwise-and 0x7FFFFFFF; null or empty is 0"
)


class FileRecord(Contract):
    """One file or folder in a model's folder."""

    sha256: str = Field(min_length=64, max_length=64)
    num_bytes: NonNegativeInt


class Preprocessing(Contract):
    """Where raw columns become network input."""

    place: str = "inside the program: every format takes the same raw columns"
    fitted_on: TimeWindow = Field(description="The training window; no other row was seen.")
    categorical: str = (
        "the program maps each category code to its own vocabulary; a code it does not know, and "
        "0, have embeddings of their own"
    )
    numeric: str = "NaN means missing; the program fills and scales with training statistics"
    category_code_rule: str = CATEGORY_CODE_RULE


class EvaluationSummary(Contract):
    """The judgement in short; `evaluation.json` holds the whole."""

    window: TimeWindow
    overall: Quality
    yardstick_name: str
    yardstick: Quality
    comparisons: tuple[Comparison, ...]


class ModelManifest(Contract):
    """`model.json`: everything needed to use, check and trace one registered model."""

    manifest_version: Literal[1] = 1
    model_name: str
    code_commit: str
    columns: DatasetSchema
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocessing: Preprocessing
    snapshot_sha256: str
    splits: DataSplits
    feature_service: str
    feature_views: dict[str, str]
    tables_version: str
    pins: SnapshotPins | None = Field(
        default=None, description="What the snapshot was made from; None in earlier releases."
    )
    label_definition: str
    training_config: dict[str, object]
    best_epoch: NonNegativeInt
    started_from: StartingPoint | None = Field(
        default=None, description="Whose weights it began with; None for none."
    )
    calibration: Calibration | None = Field(
        default=None,
        description="The map of another version's scores; None where the network was trained.",
    )
    shrinking: Shrinking | None = Field(
        default=None, description="The version that it is a smaller one of; None for none."
    )
    evaluation: EvaluationSummary
    files: dict[str, FileRecord] = Field(description="By name inside the model's folder.")


class ImportedManifest(Contract):
    """`model.json` of a program that was trained elsewhere."""

    manifest_version: Literal[1] = 1
    model_name: str
    code_commit: str
    family: str
    signature: Signature
    columns: DatasetSchema | None
    origin: dict[str, str] = Field(description="Package, its version and licence; settings.")
    origin_files: dict[str, str] = Field(description="Digest of every file it was made from.")
    snapshot_sha256: str = Field(description="Digest of `origin_files`: there is no snapshot.")
    files: dict[str, FileRecord] = Field(description="By name inside the model's folder.")


class ModelInterface(BaseModel):
    """The part of `model.json` that using the model takes.

    A champion outlives the code that registered it, so what later code added or left out elsewhere
    in the manifest does not matter here.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    columns: DatasetSchema | None
    family: str = "tabular"
    signature: Signature | None = None


class ModelStart(ModelInterface):
    """The part of `model.json` that going on from the model takes."""

    columns: DatasetSchema
    snapshot_sha256: str
    splits: DataSplits
    training_config: dict[str, object]
    files: dict[str, FileRecord]
    started_from: StartingPoint | None = None
    best_epoch: NonNegativeInt
    calibration: Calibration | None = None
    shrinking: Shrinking | None = None


class RegisteredVariant(Contract):
    """One variant and, where it was kept, its folder inside the model's folder."""

    variant: ModelVariant
    folder: str | None


class VariantList(Contract):
    """`variants.json`: all variants of a version, kept and dropped, with the reasons."""

    source_sha256: str
    variants: tuple[RegisteredVariant, ...]


@dataclass(frozen=True)
class VersionRecord:
    """What the registry really holds of one version, read back and checked by digest."""

    ref: ModelVersionRef
    manifest: ModelManifest | None
    """None too of a program that was trained elsewhere."""
    variants: VariantList | None
    damage: tuple[str, ...]
    """One sentence for each file that is missing or not what its digest says."""
    imported: ImportedManifest | None = None
    """Of a program that was trained elsewhere."""


def describe_model(
    trained: CandidateModel,
    evaluation: EvaluationReport,
    snapshot: FeatureSnapshot,
    model_name: str,
    code_commit: str,
    files: dict[str, FileRecord],
) -> ModelManifest:
    """The manifest of one trained model."""
    signature = tabular_signature(trained.columns)
    return ModelManifest(
        model_name=model_name,
        code_commit=code_commit,
        columns=trained.columns,
        inputs=signature.inputs,
        outputs=(signature.output,),
        preprocessing=Preprocessing(fitted_on=trained.splits.train),
        snapshot_sha256=trained.snapshot_sha256,
        splits=trained.splits,
        feature_service=snapshot.feature_service,
        feature_views=snapshot.feature_views,
        tables_version=snapshot.tables_version,
        pins=snapshot.pins,
        label_definition=snapshot.label_definition,
        training_config=trained.config,
        best_epoch=trained.best_epoch,
        started_from=trained.started_from,
        calibration=trained.calibration if isinstance(trained, RecalibratedModel) else None,
        shrinking=trained.shrinking if isinstance(trained, ShrunkModel) else None,
        evaluation=EvaluationSummary(
            window=evaluation.window,
            overall=evaluation.overall,
            yardstick_name=evaluation.baseline_model_name,
            yardstick=evaluation.baseline_model,
            comparisons=evaluation.comparisons,
        ),
        files=files,
    )


def describe_import(
    imported: ImportedProgram, model_name: str, code_commit: str, files: dict[str, FileRecord]
) -> ImportedManifest:
    """The manifest of a program that was trained elsewhere."""
    return ImportedManifest(
        model_name=model_name,
        code_commit=code_commit,
        family=imported.family,
        signature=imported.signature,
        columns=imported.columns,
        origin=imported.origin,
        origin_files=imported.files,
        snapshot_sha256=imported.origin_sha256,
        files=files,
    )
