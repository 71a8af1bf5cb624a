"""What the conversion has to know of a kind of model; everything else is the same for all.

A kind is one module with one `ModelKind`, entered in `KINDS`: how rows become model inputs, how two
answers for the same row differ, and what the answers are worth. Signature and weights are the
program's, so a kind serves any program that takes and gives such tensors.

What a conversion does to the task metric is that of the variant minus that of its source. Its
intervals are those of a bootstrap: rows of one day, or neighbours, resemble each other, so whole
days or blocks are drawn, with replacement, the same ones for both models.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.data import TaskKind
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.targets import interface as targets
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.stats.bootstrap import LEVELS, number_days
from tasks.stats.predicted import PredictedRows
from tasks.stats.ranked import RankedClasses, RankedRows


@dataclass(frozen=True)
class JudgedRows:
    """Rows that a program and its variants are compared on."""

    batches: targets.Batches
    """Ordinary rows, in calls of a size that every program of the kind takes."""
    edges: targets.Batches
    """Rows that data rarely holds, in calls of several sizes, of one row too."""
    distances: targets.Distances
    change: Callable[[targets.Scores, targets.Scores], Metric]
    """What the metric of `batches` loses (below 0) or gains, with its 95 % interval."""
    timing_batch: Callable[[int], targets.ModelInputs]
    """Inputs of so many typical rows, to take the time of a call."""
    metric: str
    unit: str
    """Of a gap, with a space before it; empty where a gap has none."""
    distances_of: Callable[[targets.Scores], targets.Distances] | None = None
    """Makes `distances` of the program's answers to all of `batches`, where these give the unit: it
    is then the same for whatever is compared, edge rows and a call of a single row too."""


@dataclass(frozen=True)
class ModelKind:
    """One kind of model."""

    name: str
    bounds: Mapping[str, QualityBound]
    """What a variant of each precision may change, unless the configuration says otherwise."""
    read_calibration: Callable[[targets.ConversionJob], targets.Batches]
    """Seeded inputs that show a quantiser the ranges of values.

    Raises `ConversionError` where there is nothing to calibrate on.
    """
    read_judged: Callable[[targets.ConversionJob], JudgedRows]
    """Rows to judge on. Raises `DataContractError` where they cannot judge."""
    is_transformer: bool = False
    """Quantisers then keep what attention needs in floats."""


@dataclass(frozen=True)
class LabelledRows:
    """Model inputs with what is known about each row."""

    inputs: targets.ModelInputs
    labels: NDArray[Any]
    """Whether the label is 1, bool; the number of a class; for a regression the label, float64."""
    days: NDArray[np.datetime64]


REPLICATES = 1000
Change = Callable[[targets.Scores, targets.Scores], Metric]


def paired_change(task: TaskKind, rows: LabelledRows) -> Change:
    """Change of the task's metric: AUC of a classification (of classes), R2 of a regression.

    With a single day there is nothing to draw, and the interval is the value.

    Raises:
        DataContractError: the labels do not differ.
    """
    labels = rows.labels
    if np.all(labels == labels[0]):
        raise DataContractError(
            f"the test window has the label {float(labels[0]):g} in all of {len(labels)} rows, so "
            "its metric is undefined; expected labels that differ. Choose a longer window"
        )
    day, num_days = number_days(rows.days)
    chances = np.full(num_days, 1 / num_days)
    draws = np.random.default_rng(targets.SEED).multinomial(num_days, chances, size=REPLICATES)
    weights = np.vstack([np.ones(num_days), draws])  # of all rows, then of each draw

    def qualities(scores: targets.Scores) -> NDArray[np.float64]:
        if task == "regression":
            return PredictedRows(labels, scores, None, day).measure(weights)[:, 0]
        if task == "multi-class":
            return RankedClasses(labels, scores, day, num_bins=1).auc(weights)
        return RankedRows(labels, scores, day, num_bins=1).auc(weights)

    def change(source: targets.Scores, variant: targets.Scores) -> Metric:
        changes = qualities(variant) - qualities(source)
        drawn = changes[1:][np.isfinite(changes[1:])]  # a draw whose labels do not differ has none
        low, high = np.quantile(drawn, LEVELS) if len(drawn) else (changes[0], changes[0])
        return Metric(value=float(changes[0]), low=float(low), high=float(high))

    return change


def mean_interval(values: NDArray[np.float64], num_blocks: int) -> Metric:
    """Mean over the rows and its 95 % interval, from seeded draws of blocks of neighbours."""
    block = blocks_of(len(values), num_blocks)
    sums, counts = np.bincount(block, weights=values), np.bincount(block)
    drawn = np.random.default_rng(targets.SEED).integers(0, len(counts), (REPLICATES, len(counts)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), LEVELS)
    return Metric(value=float(values.mean()), low=float(low), high=float(high))


def blocks_of(rows: int, num_blocks: int) -> NDArray[np.int64]:
    """Number of the block of each row, of at most so many."""
    return np.arange(rows) * min(num_blocks, rows) // rows


KINDS = {
    "tabular": "tasks.conversion.kinds.tabular:TABULAR",
    "text-embedding": "tasks.conversion.kinds.text_embedding:TEXT_EMBEDDING",
    "tensors": "tasks.conversion.kinds.tensors:TENSORS",
}
"""Where each kind of model is defined; its module is imported when it is used."""


def kind_of(program: RegisteredProgram) -> ModelKind:
    """The kind that a program is recorded with.

    Raises:
        ConfigurationError: the conversion knows no such kind.
    """
    if program.family not in KINDS:
        raise ConfigurationError(
            f"{program.version.name} version {program.version.version} is of the kind "
            f"{program.family!r}, conversion knows {', '.join(KINDS)}. Nothing was converted; "
            "register the program with one of these, or add a kind"
        )
    return cast(ModelKind, pkgutil.resolve_name(KINDS[program.family]))


def bound_of(kind: ModelKind, precision: str, config: ConversionConfig) -> QualityBound:
    """What a variant of this precision may change: the configured bound, else that of the kind.

    Raises:
        ConfigurationError: neither has one.
    """
    bound = config.bounds.get(precision) or kind.bounds.get(precision)
    if bound is None:
        raise ConfigurationError(
            f"there is no bound for {precision} variants of the kind {kind.name!r}; set "
            f"conversion.bounds.{precision}"
        )
    return bound
