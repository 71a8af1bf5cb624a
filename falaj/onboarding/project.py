"""The story of `falaj init`: look at the data, ask what it cannot say, propose, write, tell."""

import re
from pathlib import Path
from zoneinfo import available_timezones

from falaj.context import row
from falaj.onboarding.inspection import Rows, column_called, landed, time_column
from falaj.onboarding.proposal import Proposal, Wishes, propose
from falaj.onboarding.writing import files_of, write_project
from tasks.features.tables.sniffing import SniffedColumn, sniff
from tasks.kernel.errors import ConfigurationError

LEAST_WIDTHS = (28, 12, 22)
"""Of the list of columns: name, type, what it is taken for."""


def begin(folder: Path, data: str | None, wishes: Wishes) -> list[str]:
    """Propose a project for some data and write its files; returns what was found and written.

    Args:
        folder: of the project.
        data: a path, or an address as a raw table's `uri`.
        wishes: what somebody says of the data.

    Raises:
        ConfigurationError: a column is not there, or the folder holds other things.
        DataContractError: the data cannot be used so.
        TransientError: the source of the data does not answer.
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
    uri = data if "://" in data else str(Path.cwd() / data)
    write_project({}, folder, uri)  # sees whether it may be written, before anything is asked
    sniffed = sniff(uri)
    time = time_column(sniffed, wishes.time)
    label = column_called(sniffed, wishes.label, "--label")
    zone = wishes.time_zone or "UTC"
    if not time.has_zone:
        what = f"zone of the times in {time.written}"
        zone = wishes.answer(wishes.time_zone, what, "UTC", "--time-zone")
    if zone not in available_timezones():
        raise ConfigurationError(
            f"{zone!r} is no time zone; expected such as UTC or Asia/Muscat. Nothing was written"
        )
    with landed(uri, sniffed, time, label, zone) as rows:
        proposal = propose(name, rows, wishes)
        files = files_of(rows, proposal, folder)
        lines = _described(rows, proposal)
    write_project(files, folder, uri)
    listed = ", ".join(f"{name} ({text.count(chr(10))} lines)" for name, text in files.items())
    return [
        *lines,
        *(row("Assumed", text) for text in wishes.assumed),
        row("Written", f"{folder}: {listed}"),
        row("Next", f"cd {folder.name}; falaj check; falaj run"),
    ]


def _described(rows: Rows, proposal: Proposal) -> list[str]:
    sniffed, uri = rows.sniffed, rows.table.uri
    form = f", separated by {sniffed.delimiter!r}" if sniffed.delimiter else ""
    kind = uri.partition("://")[0] if "://" in uri else sniffed.format
    more = f" of {sniffed.num_files} files" if sniffed.num_files > 1 else ""
    total = int(str(rows.one("SELECT count(*) FROM rows")[0]))
    late = 0 if sniffed.is_sample else sniffed.num_rows - total
    more += f" ({late:,} dated in the future are left out)" if late else ""
    predicted = proposal.label if proposal.horizon else proposal.meaning
    if proposal.task == "classification":
        share = rows.one(f"SELECT avg(({proposal.label})::INTEGER) FROM rows")[0]
        predicted += f" in {share:.1%} of the rows"
    if proposal.classes:
        predicted += f": {', '.join(proposal.classes)}"
    start, validation, test, end = proposal.days
    return [
        row("Found", f"{total:,} rows{more}, {kind}{form}"),
        *_column_lines(rows, proposal),
        row("Task", f"{proposal.task}: {predicted}"),
        row("Splits", f"train from {start}, validate from {validation}, test from {test} to {end}"),
    ]


def _column_lines(rows: Rows, proposal: Proposal) -> list[str]:
    cells = [_cells(column, rows, proposal) for column in rows.sniffed.columns]
    widths = [
        max(least, *(len(cell) + 1 for cell in column))
        for column, least in zip(zip(*cells, strict=True), LEAST_WIDTHS, strict=False)
    ]
    return [
        "  " + "".join(map(str.ljust, line, widths)) + line[-1]  # the last is as long as it is
        for line in cells
    ]


def _cells(column: SniffedColumn, rows: Rows, proposal: Proposal) -> tuple[str, str, str, str]:
    roles: dict[str | None, str] = {
        **{name: f"ignored: {reason}" for name, reason in proposal.ignore.items()},
        **dict.fromkeys(proposal.key, "names a row"),
        proposal.entity: "histories are of each",
        rows.label.name: "label",
        rows.time.name: "when a row happened",
    }
    name = column.name if column.name == column.written else f"{column.written} -> {column.name}"
    missing = f", {column.num_missing:,} missing" if column.num_missing else ""
    missing += f" ({', '.join(map(repr, column.null_texts))})" if column.null_texts else ""
    shown = ", ".join(text[:20] for text in column.examples)
    other = "a time, no input" if column.type == "TIMESTAMPTZ" else "input"
    return name, column.type, roles.get(column.name, other), f"{shown}{missing}"
