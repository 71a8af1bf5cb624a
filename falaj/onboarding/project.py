"""The story of `falaj init`: look at the data, ask what it cannot say, propose, write, tell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from zoneinfo import available_timezones

from falaj.context import row
from falaj.onboarding.inspection import Rows, column_called, landed, time_column
from falaj.onboarding.proposal import Proposal, Template, choose_entity, label_of, propose
from falaj.onboarding.writing import files_of, write_project
from tasks.features.declared.aggregates import DURATION
from tasks.features.offline.duck import sql_name
from tasks.features.tables.sniffing import SniffedColumn, sniff
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT

LABEL_WAIT, HORIZON, ZONE = "30d", "24h", "UTC"
LONGEST_SHARE = 10
"""An assumed wait for labels is at most a tenth of the time that the rows are of."""


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


def begin(folder: Path, data: Path | None, wishes: Wishes) -> list[str]:
    """Propose a project for some data and write its files; returns what was found and written.

    Raises:
        ConfigurationError: a column is not there, or the folder holds other things.
        DataContractError: the data cannot be used so.
    """
    if data is None or wishes.label is None:
        raise ConfigurationError(
            "name the data and what to predict: falaj init shop --data orders.csv --label churned "
            "--time ordered_at. Nothing was written"
        )
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")
    if not re.match(r"[a-z]", name):
        raise ConfigurationError(
            f"{folder.name} gives no name for a use case; expected a folder that begins with a "
            "letter. Nothing was written"
        )
    path = data if data.is_absolute() else Path.cwd() / data
    write_project({}, folder, path)  # sees whether it may be written, before anything is asked
    sniffed = sniff(path)
    time = time_column(sniffed, wishes.time)
    label = column_called(sniffed, wishes.label, "--label")
    assumed: list[str] = []
    zone = wishes.time_zone or ZONE
    if not time.has_zone and wishes.time_zone is None:
        zone = _asked(wishes, f"zone of the times in {time.written}", ZONE, "--time-zone", assumed)
    if zone not in available_timezones():
        raise ConfigurationError(
            f"{zone!r} is no time zone; expected such as UTC or Asia/Muscat. Nothing was written"
        )
    with landed(path, sniffed, time, zone) as rows:
        proposal = _proposal(name, rows, label, time, zone, wishes, assumed)
        propose(rows, label, proposal)
        files = files_of(rows, proposal, folder)
        told = _described(rows, proposal, label)
    write_project(files, folder, path)
    return [*told, *_written(files, folder)]


def _proposal(
    name: str,
    rows: Rows,
    label: SniffedColumn,
    time: SniffedColumn,
    zone: str,
    wishes: Wishes,
    assumed: list[str],
) -> Proposal:
    task, sql, meaning = label_of(rows, label)
    is_series = wishes.template == "timeseries"
    if is_series and task != "regression":
        raise ConfigurationError(
            f"--template timeseries predicts a number, and {label.written} holds no numbers; "
            "use --template events. Nothing was written"
        )
    entity = column_called(rows.sniffed, wishes.key, "--key").name if wishes.key else None
    if entity is None and not is_series:
        entity = choose_entity(rows, {label.name, time.name})
        what = f"histories are of each {entity}" if entity else "one history is of all rows"
        assumed.append(f"{what} (--key)")
    horizon, wait = "", "0m"
    if is_series:
        what = "how far ahead to predict"
        horizon = wishes.horizon or _asked(wishes, what, HORIZON, "--horizon", assumed)
    else:
        default = _longest_wait(rows, time.name)
        what = f"how long after its row's time {label.written} is known"
        wait = wishes.label_known_after or _asked(
            wishes, what, default, "--label-known-after", assumed
        )
    for option, text in (("--horizon", horizon), ("--label-known-after", wait)):
        if text and not re.fullmatch(DURATION, text):
            raise ConfigurationError(
                f"{option} {text}: expected a duration such as 15m, 6h or 30d. Nothing was written"
            )
    return Proposal(
        name=name,
        template=wishes.template,
        task=task,
        label=sql,
        meaning=meaning,
        time=time.name,
        zone=zone,
        entity=entity,
        key=(),
        known_after="1h",
        label_known_after=wait,
        days=None,  # type: ignore[arg-type]
        horizon=horizon,
        assumed=assumed,
    )


def _longest_wait(rows: Rows, time: str) -> str:
    span = rows.one(f"SELECT max({sql_name(time)}) - min({sql_name(time)}) FROM rows")[0]
    days = span.days // LONGEST_SHARE if isinstance(span, timedelta) else 0
    return f"{min(int(LABEL_WAIT[:-1]), max(1, days))}d"


def _asked(wishes: Wishes, what: str, default: str, option: str, assumed: list[str]) -> str:
    if wishes.ask is not None:
        return wishes.ask(f"{what[:1].upper()}{what[1:]} [{default}]: ").strip() or default
    assumed.append(f"{what}: {default} ({option})")
    return default


def _described(rows: Rows, proposal: Proposal, label: SniffedColumn) -> list[str]:
    sniffed = rows.sniffed
    form = f", separated by {sniffed.delimiter!r}" if sniffed.delimiter else ""
    more = f" of {sniffed.num_files} files" if sniffed.num_files > 1 else ""
    total = int(str(rows.one("SELECT count(*) FROM rows")[0]))
    late = 0 if more or sniffed.is_sample else sniffed.num_rows - total
    more += f" ({late:,} dated in the future are left out)" if late else ""
    lines = [
        row("Found", f"{total:,} rows{more}, {sniffed.format}{form}"),
        *(_column_line(column, proposal, label) for column in sniffed.columns),
        row("Task", f"{proposal.task}: {proposal.label if proposal.horizon else proposal.meaning}"),
    ]
    positive = f"avg(({proposal.label})::INTEGER)" if proposal.task == "classification" else None
    if positive:
        share = rows.one(f"SELECT {positive} FROM rows")[0]
        lines[-1] += f" in {share:.1%} of the rows"
    if proposal.classes:
        lines[-1] += f": {', '.join(proposal.classes)}"
    start, validation, test, end = proposal.days
    lines.append(
        row("Splits", f"train from {start}, validate from {validation}, test from {test} to {end}")
    )
    lines += [row("Assumed", text) for text in proposal.assumed]
    return lines


def _column_line(column: SniffedColumn, proposal: Proposal, label: SniffedColumn) -> str:
    roles = {
        proposal.time: "when a row happened",
        label.name: "label",
        proposal.entity: "histories are of each",
    }
    role = roles.get(column.name)
    if role is None:
        role = "names a row" if column.name in proposal.key else "input"
        role = "ignored" if column.name in proposal.ignore else role
    name = column.name if column.name == column.written else f"{column.written} -> {column.name}"
    missing = f", {column.num_missing:,} missing" if column.num_missing else ""
    missing += f" ({', '.join(map(repr, column.null_texts))})" if column.null_texts else ""
    shown = ", ".join(text[:20] for text in column.examples)
    return f"  {name:<28}{column.type:<12}{role:<22}{shown}{missing}"


def _written(files: dict[str, str], folder: Path) -> list[str]:
    listed = ", ".join(f"{name} ({text.count(chr(10))} lines)" for name, text in files.items())
    return [
        row("Written", f"{folder}: {listed}"),
        row("Next", f"cd {folder.name}; falaj check; falaj run"),
    ]


def copy_example(name: str, folder: Path) -> list[str]:
    """Copy a shipped project into a new folder.

    Raises:
        ConfigurationError: something is in the folder.
    """
    places = (PROJECT_ROOT / "falaj" / "examples", PROJECT_ROOT / "feature_repo")
    source = next(place / name for place in places if (place / name).is_dir())
    write_project({}, folder, folder / ".falaj")
    shutil.copytree(
        source, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    return [row("Written", f"{folder}, a copy of the example {name}")]
