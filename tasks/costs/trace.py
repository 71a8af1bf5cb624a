"""What trainings would have cost on spot hosts: a trace of prices and evictions, replayed."""

import csv
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tasks.contracts.base import Contract
from tasks.contracts.hardware import GPU, S_PER_HOUR, kind_of
from tasks.contracts.telemetry import ResourceUse
from tasks.kernel.errors import DataContractError
from tasks.kernel.values import in_utc


class TraceRow(Contract):
    """From a moment on, until the next row of the class: the price, and whether hosts are away."""

    moment: datetime
    hardware_class: str
    price: float
    """Of one core, or GPU, for an hour."""
    evicted: bool


class Replayed(NamedTuple):
    """Over all starts in the trace: mean money, its 2.5 and 97.5 percentiles, mean hours."""

    amount: float
    low: float
    high: float
    hours: float


def read_trace(file: Path) -> list[TraceRow]:
    """The rows of a CSV with the columns moment, class, price and evicted (0 or 1), by moment.

    Raises:
        DataContractError: it is no such file.
    """
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [row | {"hardware_class": row.pop("class", "")} for row in csv.DictReader(lines)]
        found = TypeAdapter(list[TraceRow]).validate_python(rows, strict=False)
    except (OSError, ValidationError, UnicodeDecodeError) as exc:
        raise DataContractError(
            f"{file} is no trace of prices ({str(exc).splitlines()[0]}); expected a CSV with the "
            "columns moment, class, price and evicted (0 or 1). Nothing was compared"
        ) from exc
    return sorted(found, key=lambda row: in_utc(row.moment))


def replay(
    uses: Sequence[ResourceUse], trace: Sequence[TraceRow], checkpoint_s: float
) -> Replayed | None:
    """The same work on hosts of the trace, begun at each of its rows; None where it is too short.

    An eviction takes the host away until a row without one, and the work since the last checkpoint
    is done, and paid, again. Starts from which the trace ends too early are left out.

    Args:
        uses: each training; they begin together.
        trace: rows of one class, by moment.
        checkpoint_s: seconds between two checkpoints.
    """
    if not trace:
        return None
    gpu = kind_of(trace[0].hardware_class) == GPU
    units = [(use.gpu_s if gpu else use.cpu_s) / use.seconds for use in uses]
    starts = [
        [_spot(use.seconds, trace[i:], checkpoint_s) for use in uses] for i in range(len(trace))
    ]
    whole = np.array([start for start in starts if None not in start], float)
    if not whole.size:
        return None
    amounts, hours = whole[:, :, 0] @ units, whole[:, :, 1].sum(axis=1)
    low, high = np.quantile(amounts, (0.025, 0.975))
    return Replayed(float(amounts.mean()), float(low), float(high), float(hours.mean()))


def _spot(
    work_s: float, trace: Sequence[TraceRow], checkpoint_s: float
) -> tuple[float, float] | None:
    """Money for one unit (core or GPU) until the work is done, and hours until then."""
    done_s = amount = waited_s = 0.0
    for row, after in zip(trace, [*trace[1:], None], strict=True):
        lasts_s = math.inf if after is None else (after.moment - row.moment).total_seconds()
        if row.evicted:
            done_s -= done_s % checkpoint_s
            if after is None:
                return None
            waited_s += lasts_s
            continue
        worked_s = min(lasts_s, work_s - done_s)
        amount += worked_s / S_PER_HOUR * row.price
        waited_s, done_s = waited_s + worked_s, done_s + worked_s
        if done_s >= work_s:
            return amount, waited_s / S_PER_HOUR
    return None
