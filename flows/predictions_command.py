"""`python -m flows predictions`: look at the prediction log, export it, give it labels, erase."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError, WindowError
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from tasks.predictions.reading import LogCount, LogQuery


def add_predictions_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    predictions = commands.add_parser("predictions", help="look at what was served, and label it")
    acts = predictions.add_subparsers(dest="act", required=True, metavar="act")
    counts = acts.add_parser("counts", help="rows by model, version, variant and slot")
    counts.add_argument("--model", help="of this model only")
    export = acts.add_parser("export", help="a window as one Parquet or CSV file")
    export.add_argument("model")
    export.add_argument("file", type=Path, help="ends in .parquet or .csv")
    export.add_argument("--version", action="append", help="of this version; may be repeated")
    export.add_argument("--slot", action="append", help="stable, candidate or shadow")
    export.add_argument("--labels", action="store_true", help="with the labels known by now")
    for act in (counts, export):
        act.add_argument("--start", help="first moment of arrival, such as 2026-11-01T00:00Z")
        act.add_argument("--end", help="first moment after the window")
    label = acts.add_parser("label", help="import a Parquet table of labels")
    label.add_argument("model")
    label.add_argument(
        "file",
        type=Path,
        help="columns label, and request_id (and request_row) or entity keys and event_timestamp; "
        "known_at if known",
    )
    erase = acts.add_parser("erase", help="remove all rows that one subject asked for, for good")
    erase.add_argument("subject", help="as column `subject` has it: who asked")
    erase.add_argument("--model", help="of this model only")


def run_predictions(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Carry out one act and say what to tell.

    Raises:
        ConfigurationError: a moment or a file's name is wrong.
        DataContractError: labels are none, or parts could not be looked through.
        StorageError: the disk refused a write.
    """
    acts = {"counts": _counts, "export": _export, "label": _label, "erase": _erase}
    return acts[options.act](options, settings)


def _counts(options: argparse.Namespace, settings: Settings) -> list[str]:
    from tasks.predictions.reading import ReadTally, count_by_version

    tally = ReadTally()
    found = count_by_version(settings.home, options.model, _window(options), tally)
    lines = [_line(count) for count in found] or ["Nothing is logged there."]
    return [*lines, *tally.damaged]


def _line(count: LogCount) -> str:
    refused = f", {count.refused:,} refused" if count.refused else ""
    by = (
        f"version {count.version} as {count.slot} by {count.variant}"
        if count.variant
        else f"nobody as {count.slot}"
    )
    return (
        f"{count.model:<20} {by}: {count.answered:,} answered{refused}; {count.first:%F %T}Z to "
        f"{count.last:%F %T}Z"
    )


def _export(options: argparse.Namespace, settings: Settings) -> list[str]:
    import pyarrow as pa

    from tasks.predictions.export import write_window
    from tasks.predictions.joining import JoinTally, labelled_rows
    from tasks.predictions.labels import LABEL
    from tasks.predictions.reading import ReadTally, logged_columns, read_rows

    query, read, joined = _query(options), ReadTally(), JoinTally()
    if options.file.suffix in (".parquet", ".csv"):
        _check_model(settings.home, query.model)
    schema = logged_columns(settings.home, query.model, query.window)
    if options.labels:
        rows = labelled_rows(
            *(settings.home, query, schema.names),
            known_by=datetime.now(UTC),
            tally=joined,
            read=read,
        )
        num_rows = write_window(rows, schema.append(pa.field(LABEL, pa.float64())), options.file)
    else:
        rows = read_rows(settings.home, query, schema.names, tally=read)
        num_rows = write_window(rows, schema, options.file)
    lines = [f"{'Written':<10}{num_rows:,} rows to {options.file}", *read.damaged]
    if options.labels:
        lines.append(
            f"{'Labels':<10}{joined.labelled:,} rows have one, {joined.unlabelled:,} none; "
            f"{joined.corrected:,} were corrected, {joined.conflicting:,} contradict each other, "
            f"{joined.unmatched:,} met no row"
        )
    return lines


def _check_model(home: Path, model: str) -> None:
    """Refuse a model of which nothing was ever logged: a misspelt name would export no rows."""
    from tasks.predictions.schema import logged_models

    if model not in (known := logged_models(home)):
        raise ConfigurationError(
            f"nothing is logged of a model {model!r}; there is {', '.join(sorted(known)) or 'none'}"
            ". Nothing was written"
        )


def _label(options: argparse.Namespace, settings: Settings) -> list[str]:
    from tasks.predictions.labels import import_labels

    taken = import_labels(settings.home, options.model, options.file, datetime.now(UTC))
    return [
        f"{'Labels':<10}{taken.rows:,} by {taken.kind}, {taken.without_label:,} rows had none",
        f"{'Kept':<10}{taken.file}",
    ]


def _erase(options: argparse.Namespace, settings: Settings) -> list[str]:
    from tasks.features.access.audit import AuditTrail
    from tasks.predictions.erasure import erase_subject
    from tasks.predictions.masking import open_mask

    # The trail names nobody: a digest that only this installation can compare.
    named = open_mask(settings.home).text(options.subject)
    trail = AuditTrail(settings.home / "audit")
    facts: dict[str, Any] = {"subject_digest": named, "model": options.model}
    with trail.recorded("erase-predictions", **facts) as told:
        erasure = erase_subject(settings.home, options.subject, options.model)
        told.update(rows=erasure.rows, labels=erasure.labels, unread_parts=len(erasure.unread))
    if erasure.unread:
        raise DataContractError(
            f"{erasure.rows:,} rows and {erasure.labels:,} labels were erased, but not everything "
            f"could be looked through: {'; '.join(erasure.unread)}"
        )
    return [
        f"{'Erased':<10}{erasure.rows:,} rows of {erasure.parts:,} parts; {erasure.labels} labels",
        f"{'Audit':<10}{named}",
        "A server that runs may still hold rows of the last seconds: run this again in a minute.",
    ]


def _query(options: argparse.Namespace) -> LogQuery:
    from tasks.predictions.reading import LogQuery

    answered = True if options.labels else None
    return LogQuery(
        options.model,
        _window(options),
        versions=options.version,
        slots=options.slot,
        answered=answered,
    )


def _window(options: argparse.Namespace) -> TimeWindow | None:
    """The window of the command line; None where neither end is given.

    Raises:
        ConfigurationError: one end is given without the other, or is no moment.
        WindowError: it is reversed, empty or has no zone.
    """
    if options.start is None and options.end is None:
        return None
    if options.start is None or options.end is None:
        raise ConfigurationError("give --start and --end, or neither. Nothing was read")
    try:
        moments = [datetime.fromisoformat(text) for text in (options.start, options.end)]
    except ValueError as exc:
        raise ConfigurationError(
            f"{exc}; write a moment as 2026-11-01T00:00Z. Nothing was read"
        ) from exc
    try:
        return TimeWindow(start=moments[0], end=moments[1])
    except ValidationError as exc:
        raise WindowError(exc.errors()[0]["msg"].removeprefix("Value error, ")) from exc
