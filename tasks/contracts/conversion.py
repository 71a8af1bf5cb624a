"""Values about what a conversion works on: tensors of a program, and rows to convert it with.

Values about what was measured of a variant, and what it was chosen for. How a program's file is
opened, by all who read one.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from tasks.contracts.base import Artifact, Contract
from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.evaluation import Metric
from tasks.kernel.errors import ArtifactError
from tasks.kernel.values import Described

if TYPE_CHECKING:  # whoever opens no program needs no PyTorch, which takes a second to import
    from torch.export import ExportedProgram

BATCH_AXIS = "batch"
MOST_ROWS = 65_536  # a call, of a program that training exports
TensorType = Literal["bool", "uint8", "int32", "int64", "float32"]


class TensorSpec(Described):
    """One input or output of every format of a model."""

    name: str = Field(min_length=1, description="As the program's argument is named.")
    dtype: TensorType = Field(description="Type of its numbers.")
    shape: tuple[str | int, ...] = Field(min_length=1)
    """Length of each axis; a name is an axis of any length."""
    columns: tuple[str, ...] = ()
    """Meaning of the second axis of raw columns, or classes, in order."""


class Signature(Described):
    """What a program takes and gives; every format of it takes and gives the same."""

    inputs: tuple[TensorSpec, ...] = Field(min_length=1)
    """What it takes, in the order of its arguments."""
    output: TensorSpec = Field(description="What it gives, under a name that no input bears.")
    largest: dict[str, PositiveInt] = Field(default={})
    """Most that an axis of any length takes, by its name."""

    @model_validator(mode="after")
    def _rows_come_first(self) -> Self:
        names = [spec.name for spec in (*self.inputs, self.output)]
        if len(set(names)) != len(names):
            raise ValueError(f"tensors {names} name something twice; give each a name of its own")
        for spec in (*self.inputs, self.output):
            if spec.shape[0] != BATCH_AXIS:
                raise ValueError(
                    f"tensor {spec.name!r} has shape {spec.shape}, expected {BATCH_AXIS!r} as its "
                    "first axis: programs take any number of rows"
                )
        return self


def tabular_signature(columns: DatasetSchema) -> Signature:
    """The tensors of a program that takes these raw columns: one score a row, or one a class."""
    raw = (("categorical", "int32", columns.categorical), ("numeric", "float32", columns.numeric))
    return Signature.model_validate(
        {
            "inputs": [
                {"name": name, "dtype": dtype, "shape": (BATCH_AXIS, len(names)), "columns": names}
                for name, dtype, names in raw
            ],
            "output": {
                "name": "score",
                "dtype": "float32",
                "shape": (BATCH_AXIS, *([len(columns.classes)] if columns.classes else [])),
                "columns": columns.classes,
            },
            "largest": {BATCH_AXIS: MOST_ROWS},
        }
    )


class SnapshotRows(Contract):
    """Rows of a validated snapshot: the training window calibrates, the test window judges."""

    kind: Literal["snapshot"] = "snapshot"
    dataset: ValidatedDataset
    splits: DataSplits

    @property
    def calibration_key(self) -> tuple[object, ...]:
        """What decides the calibrating rows."""
        return self.dataset.snapshot.data.sha256, self.splits.train

    @property
    def calibration_source(self) -> dict[str, str]:
        """Where the calibrating rows come from, for the settings of a variant."""
        return {
            "calibration_snapshot_sha256": self.dataset.snapshot.data.sha256,
            "calibration_window": str(self.splits.train),
        }


class PreparedRows(Described):
    """Model inputs that were prepared beforehand, in two parts: for calibration and for judging."""

    kind: Literal["prepared"] = "prepared"
    data: Artifact = Field(description="Parquet; the column `part` is `calibration` or `judged`.")
    num_calibration: PositiveInt
    num_judged: PositiveInt
    made_from: dict[str, str] = Field(description="Sources and their versions.")
    tokenizer: Artifact | None = None
    """What made token ids of texts, as a file of `tokenizers`."""

    @property
    def calibration_key(self) -> tuple[object, ...]:
        """What decides the calibrating rows."""
        return (self.data.sha256,)

    @property
    def calibration_source(self) -> dict[str, str]:
        """Where the calibrating rows come from, for the settings of a variant."""
        return {
            "calibration_rows_sha256": self.data.sha256,
            **{f"calibration_source_{name}": text for name, text in self.made_from.items()},
        }


ConversionRows = Annotated[SnapshotRows | PreparedRows, Field(discriminator="kind")]
"""Where the rows come from that calibrate a conversion and judge its results."""


class ImportedProgram(Contract):
    """A program that was trained elsewhere, and where it comes from."""

    program: Artifact
    family: str
    signature: Signature
    columns: DatasetSchema | None = None
    origin: dict[str, str] = Field(description="Package, its version and licence; settings.")
    files: dict[str, str] = Field(description="Digest of every file it was made from, by name.")
    origin_sha256: str = Field(min_length=64, max_length=64, description="Digest of `files`.")


class VariantLatency(Described):
    """Latency of one variant at one batch size, one thread, against PyTorch eager beside it."""

    batch_rows: PositiveInt
    p50_ms: float
    p95_ms: float
    ratio_to_eager: float = Field(description="Median of paired ratios; below 1 is faster.")
    ratio_to_replaced: float | None = None
    """Against the simpler variant it would replace, paired."""
    cpu_ms: float | None = None
    """Processor time of a call, all threads: median of the rounds."""
    cpu_ratio_to_eager: float | None = None
    """The same as `ratio_to_eager`, of processor time."""


class VariantThroughput(Contract):
    """Rows a second of one variant when all cores ask it, each for calls of its own."""

    batch_rows: PositiveInt
    streams: PositiveInt = Field(description="Callers at the same time, each with a copy.")
    rows_per_s: Metric = Field(description="Median of the rounds and its 95 % interval.")
    cpu_s_per_million: NonNegativeFloat = Field(description="Processor seconds, million rows.")


class VariantPrice(Contract):
    """What answering costs on the measured hardware when all cores are busy."""

    per_million: NonNegativeFloat = Field(description="Rows, in `currency`.")
    per_core_hour: NonNegativeFloat = Field(description="As configured; of a GPU where it is one.")
    currency: str


class GoalResult(Contract):
    """Whether a variant was chosen for one goal on its hardware, and why or why not."""

    goal: str
    rule: str = Field(description="What the goal asks for, as a sentence.")
    figure: float | None = Field(description="What the rule compares; None where not measured.")
    unit: str
    chosen: bool
    reason: str


def open_program(path: Path) -> ExportedProgram:
    """Read a `.pt2` file without letting it run code.

    `torch.export.load` unpickles parts that an archive marks so, and falls back to an unrestricted
    unpickler where the restricted one refuses; such archives are refused here before that.

    Raises:
        ArtifactError: it is no program archive, or holds pickled objects.
    """
    import torch

    try:
        _refuse_pickled_objects(path)
        with warnings.catch_warnings():  # torch 2.13 warns of a change inside its own loader
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            return torch.export.load(path)
    except (zipfile.BadZipFile, RuntimeError, KeyError, json.JSONDecodeError) as exc:
        raise ArtifactError(
            f"{path.name} cannot be read as a torch.export program ({exc}); expected a .pt2 file "
            "as training writes it. Train again to make a new one"
        ) from exc


def _refuse_pickled_objects(path: Path) -> None:
    import torch

    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("_config.json"):
                entries = json.loads(archive.read(name))["config"].values()
                _refuse_if(any(entry.get("use_pickle") for entry in entries), path, name)
            elif name.endswith(".pt") and (content := archive.read(name)):
                try:
                    torch.load(io.BytesIO(content), weights_only=True)
                except pickle.UnpicklingError:
                    _refuse_if(True, path, name)


def _refuse_if(unsafe: bool, path: Path, member: str) -> None:
    if unsafe:
        raise ArtifactError(
            f"{path.name} holds pickled objects in {member}, and unpickling can run any code; "
            "expected plain tensors alone. Nothing was loaded; find out who wrote this file"
        )
