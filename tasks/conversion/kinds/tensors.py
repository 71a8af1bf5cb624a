"""Programs of any kind: numbers in, numbers out, and rows of both parts in a Parquet file.

What a program means nobody has to say. Answers are compared in units of their own spread, and their
worth by labels, where the rows have a column `label`: accuracy of classes, AUC of a single score,
R2 of numbers. Without labels the program itself is the label. So a model that nobody here knows is
converted by a configuration alone; a kind of its own can know more about it.

A column of the Parquet file is an input, of nested lists.
"""

import math
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.conversion import BATCH_AXIS, PreparedRows, Signature, TensorSpec
from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import QualityBound
from tasks.conversion.kinds import interface as kinds
from tasks.conversion.targets import interface as targets
from tasks.kernel.errors import ConfigurationError, ConversionError, DataContractError

EDGE_ROWS = 64
EDGE_CALLS = (1, 2, 7, 64)


def read_inputs(table: pa.Table, signature: Signature) -> targets.ModelInputs:
    """The inputs of a signature from the columns of a table, same rows in the same order.

    A column bears the name of its input and holds what one row of it is: a number, or a list, as
    deep as the input has axes after the first; a flat list will do where these are all fixed. An
    input whose `columns` are named is read from columns of these names instead.

    Raises:
        DataContractError: a column is absent, has nulls, is no number, or another shape.
    """
    arrays: dict[str, targets.Array] = {}
    axes: dict[str, int] = {}
    for spec in signature.inputs:
        array = _array_of(table, spec)
        for axis, length in zip(spec.shape[1:], array.shape[1:], strict=True):
            expected = axes.setdefault(axis, length) if isinstance(axis, str) else axis
            most = signature.largest.get(str(axis), length)
            if length != expected or length > most:
                raise DataContractError(
                    f"the rows have {list(array.shape[1:])} values of {spec.name!r} each, the "
                    f"program takes {list(spec.shape[1:])} ({dict(signature.largest)} at most)"
                )
        arrays[spec.name] = array
    return targets.ModelInputs(arrays)


def _array_of(table: pa.Table, spec: TensorSpec) -> targets.Array:
    """The column of an input in the program's type; whole numbers are not made of others."""
    inner = spec.shape[1:]
    if spec.columns and set(spec.columns) <= set(table.column_names):
        values = np.stack([_numbers(table, name)[0] for name in spec.columns], axis=1)
    else:
        flat, lengths = _numbers(table, spec.name)
        if all(isinstance(axis, int) for axis in inner) and lengths == (math.prod(inner),):
            lengths = inner  # type: ignore[assignment]
        if len(lengths) != len(inner):
            raise DataContractError(
                f"column {spec.name!r} holds {list(lengths)} numbers a row, the program takes "
                f"{list(inner)}; nest the lists as the program's axes are"
            )
        values = flat.reshape(table.num_rows, *lengths)
    with np.errstate(invalid="ignore"):  # of numbers that are no whole ones: compared below
        typed = np.ascontiguousarray(values, dtype=spec.dtype)
    if np.issubdtype(typed.dtype, np.integer) and not np.array_equal(typed, values):
        raise DataContractError(
            f"the rows of {spec.name!r} hold {values[typed != values].flat[0]}, and the program "
            f"takes whole numbers ({spec.dtype}); write what it takes into the Parquet file"
        )
    return typed


def _numbers(table: pa.Table, name: str) -> tuple[NDArray[np.generic], tuple[int, ...]]:
    """All numbers of a column in one row, and how long its lists are, from outer to inner."""
    if name not in table.column_names:
        raise DataContractError(
            f"the prepared rows have the columns {', '.join(table.column_names)}, expected "
            f"{name!r} with what the program takes of each row"
        )
    column, types = table[name].combine_chunks(), pa.types
    lengths: list[int] = []
    while isinstance(column, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        found = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(found) != 1 or found[0] is None:
            raise DataContractError(
                f"the lists of column {name!r} have {len(found)} different lengths, or are absent "
                "in some rows; rows are compared side by side, so make them equally long"
            )
        lengths.append(int(found[0]))
        column = column.flatten()
    if types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if column.null_count or not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise DataContractError(
            f"column {name!r} holds {column.type} with {column.null_count} nulls, expected numbers "
            "without; what is missing has to be said as the program expects it"
        )
    return column.to_numpy(zero_copy_only=False), tuple(lengths)


def edge_calls(inputs: targets.ModelInputs, most_rows: int) -> tuple[targets.ModelInputs, ...]:
    """Rows that data rarely holds, in calls of several sizes.

    The least and the greatest value of each place, places of different rows put together, and the
    rows backwards: all within what was seen, for a program may know no other value.

    Args:
        inputs: ordinary rows.
        most_rows: of a call.
    """
    rng = np.random.default_rng(targets.SEED)
    mixed = {name: _mixed(array, rng) for name, array in inputs.items()}
    rows = targets.ModelInputs(mixed)
    return tuple(rows.block(0, size) for size in EDGE_CALLS if size <= most_rows)


def _mixed(array: targets.Array, rng: np.random.Generator) -> targets.Array:
    flat = array.reshape(len(array), -1)
    rows = rng.integers(0, len(flat), (EDGE_ROWS, flat.shape[1]))
    made = np.take_along_axis(flat, rows, axis=0)
    made[0::4], made[1::4] = flat.min(axis=0), flat.max(axis=0)
    return np.ascontiguousarray(made.reshape(EDGE_ROWS, *array.shape[1:]))


def most_rows_of(signature: Signature) -> int:
    """Rows that a call of the program may have."""
    return signature.largest.get(BATCH_AXIS, EDGE_ROWS * 16)


LABEL = "label"
CALL_ROWS = 256
BLOCKS = 200
"""Rows are drawn in so many blocks of neighbours for the interval of the metric."""
FEWEST_JUDGED = 8
LEAST_SPREAD = 0.01
ACCURACY_NAME, AGREEMENT_NAME = "accuracy", "agreement"
UNIT = " standard deviations"
BOUNDS = {
    "fp32": QualityBound(max_gap=0.001, mean_gap=1e-4, quality_drop=0.002),
    "fp16": QualityBound(max_gap=0.02, mean_gap=0.002, quality_drop=0.005),
    "bf16": QualityBound(max_gap=0.1, mean_gap=0.01, quality_drop=0.01),
    "int8": QualityBound(max_gap=0.5, mean_gap=0.05, edge_gap=1.0, quality_drop=0.02),
}


def spread_of(answers: targets.Scores, apart: bool) -> targets.FloatArray:
    """Standard deviation of each answer over the rows: the unit of its gaps.

    Args:
        answers: of the program, to ordinary rows.
        apart: each answer has a unit of its own, for one may be a price and the next a share; where
            it hardly differs, a hundredth of the widest. Of classes, all have the mean of them.

    Returns:
        One figure for each answer of a row, 1 where the program gives all rows the same.
    """
    spread: targets.FloatArray = answers.astype(np.float64).std(axis=0)
    if apart:
        unit = np.maximum(spread, LEAST_SPREAD * spread.max(initial=0.0))
    else:
        unit = np.full_like(spread, spread.mean())
    return np.where(unit > 0, unit, 1.0)


def spread_distances(
    reference: targets.Scores, converted: targets.Scores, unit: targets.FloatArray | None = None
) -> targets.FloatArray:
    """Largest difference of each row's answers, each in its unit; see `spread_of`.

    Without a unit in standard deviations of these very rows.
    """
    unit = spread_of(reference, apart=True) if unit is None else unit
    gaps = np.abs(reference.astype(np.float64) - converted) / unit
    furthest: targets.FloatArray = gaps.reshape(len(reference), -1).max(axis=1)
    return furthest


def _distances(answers: targets.Scores, apart: bool) -> targets.Distances:
    return partial(spread_distances, unit=spread_of(answers, apart))


def _classes(scores: targets.Scores) -> NDArray[np.int64]:
    greatest: NDArray[np.int64] = scores.reshape(len(scores), -1).argmax(axis=1)
    return greatest


def _metric(
    program: RegisteredProgram, judged: targets.ModelInputs, labels: NDArray[np.generic] | None
) -> tuple[str, kinds.Change]:
    """Name of the metric, and what a variant changes of it.

    Several answers a row are classes, of which the greatest is the choice. Without labels it counts
    how many choices stay, or how much of the spread of the program's own answers is kept.
    """
    has_classes = any(axis != 1 for axis in program.signature.output.shape[1:])
    if has_classes and labels is not None and labels.dtype.kind not in "iu":
        raise DataContractError(
            f"the column {LABEL!r} holds {labels.dtype}, the program gives one answer a class; "
            "expected the number of each row's class, from 0"
        )

    def accuracy(source: targets.Scores, variant: targets.Scores) -> Metric:
        right = _classes(source) if labels is None else labels
        return kinds.mean_interval(
            (_classes(variant) == right) - 1.0 * (_classes(source) == right), BLOCKS
        )

    def explained(source: targets.Scores, variant: targets.Scores) -> Metric:
        exact = source.astype(np.float64)  # a spread beside a large offset is lost in 32 bits
        errors = ((exact - variant) ** 2).reshape(len(source), -1).sum(axis=1)
        return kinds.mean_interval(-errors / (float(exact.var(axis=0).sum()) or 1.0), BLOCKS)

    if has_classes or labels is None:
        name = AGREEMENT_NAME if labels is None else ACCURACY_NAME
        return name, accuracy if has_classes else explained
    is_binary = set(np.unique(labels).tolist()) <= {0, 1}
    paired = kinds.paired_change(
        "classification" if is_binary else "regression",
        kinds.LabelledRows(
            inputs=judged,
            labels=labels == 1 if is_binary else labels.astype(np.float64),
            days=kinds.blocks_of(len(labels), BLOCKS).astype("datetime64[D]"),
        ),
    )
    name = AUC_NAME if is_binary else R2_NAME
    return name, lambda source, variant: paired(source.reshape(-1), variant.reshape(-1))


def _read_calibration(job: targets.ConversionJob) -> targets.Batches:
    try:
        inputs, _ = _read(job, "calibration")
    except DataContractError as exc:
        raise ConversionError(f"there is nothing to calibrate INT8 on: {exc}") from exc
    count = min(job.config.calibration_rows, inputs.num_rows)
    chosen = np.random.default_rng(targets.SEED).choice(inputs.num_rows, count, replace=False)
    sample = inputs.taken(np.sort(chosen))
    return tuple(sample.blocks(min(CALL_ROWS, most_rows_of(job.program.signature))))


def _read_judged(job: targets.ConversionJob) -> kinds.JudgedRows:
    inputs, labels = _read(job, "judged")
    if inputs.num_rows < FEWEST_JUDGED:
        raise DataContractError(
            f"the prepared rows have {inputs.num_rows} rows to judge on, expected at least "
            f"{FEWEST_JUDGED}; prepare more"
        )
    most_rows = most_rows_of(job.program.signature)
    if (wanted := max(job.config.batch_sizes)) > most_rows:
        raise ConfigurationError(
            f"latency is asked for at {wanted} rows a call, the program takes {most_rows} at most; "
            "name smaller ones in conversion.batch_sizes"
        )
    name, change = _metric(job.program, inputs, labels)
    return kinds.JudgedRows(
        batches=tuple(inputs.blocks(min(CALL_ROWS, most_rows))),
        edges=edge_calls(inputs, most_rows),
        distances=spread_distances,
        distances_of=partial(_distances, apart=name != ACCURACY_NAME),
        change=change,
        timing_batch=inputs.repeated,
        metric=name,
        unit=UNIT,
    )


def _read(
    job: targets.ConversionJob, part: str
) -> tuple[targets.ModelInputs, NDArray[np.generic] | None]:
    """Inputs of one part of the rows, and their labels where the file has them."""
    rows = job.rows
    if not isinstance(rows, PreparedRows):
        raise ConfigurationError(
            f"a program of the kind {TENSORS.name!r} is converted with prepared rows, and got "
            f"rows of a {rows.kind}; name a Parquet file with a column for each input"
        )
    table = pq.read_table(job.store.path(rows.data), filters=[("part", "==", part)])
    if not table.num_rows:
        raise DataContractError(f"the prepared rows have none whose part is {part!r}")
    labels = table[LABEL] if LABEL in table.column_names else None
    if labels is not None and labels.null_count:
        raise DataContractError(
            f"{labels.null_count} rows of the part {part!r} have no {LABEL}; leave such rows out, "
            "or the column"
        )
    found = None if labels is None else labels.to_numpy()
    return read_inputs(table, job.program.signature), found


TENSORS = kinds.ModelKind(
    name="tensors", bounds=BOUNDS, read_calibration=_read_calibration, read_judged=_read_judged
)
