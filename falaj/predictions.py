"""Commands of the prediction log: count, export, label, erase."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from falaj.context import End, Here, Start, optional_window
from falaj.loop import row
from tasks.kernel.errors import ConfigurationError, DataContractError

if TYPE_CHECKING:
    from tasks.predictions.reading import LogCount

app = App(name="predictions")


@app.command
def counts(
    *, model: str | None = None, start: Start | None = None, end: End | None = None, context: Here
) -> list[str]:
    """Count rows by model, version, variant and deployment track.

    Args:
        model: Of this model only.
        start: First moment of arrival, such as 2026-11-01T00:00Z.
        end: First moment after the window.
    """
    from tasks.predictions.reading import ReadTally, count_by_version

    tally = ReadTally()
    found = count_by_version(context.home, model, optional_window(start, end), tally)
    lines = [_line(count) for count in found] or ["No request is logged there."]
    return [*lines, *tally.damaged]


def _line(count: LogCount) -> str:
    refused = f", {count.refused:,} refused" if count.refused else ""
    by = (
        f"version {count.version} as {count.track} by {count.variant}"
        if count.variant
        else f"nobody as {count.track}"
    )
    return (
        f"{count.model:<20} {by}: {count.answered:,} answered{refused}; {count.first:%F %T}Z to "
        f"{count.last:%F %T}Z"
    )


@app.command
def export(
    model: str,
    file: Path,
    /,
    *,
    version: list[str] | None = None,
    track: Annotated[list[str] | None, Parameter(name=["--track", "--slot"])] = None,
    labels: bool = False,
    start: Start | None = None,
    end: End | None = None,
    context: Here,
) -> list[str]:
    """Export a window as one Parquet or CSV file.

    Args:
        model: Registered model.
        file: Ends in .parquet or .csv.
        version: Of this version; may be repeated.
        track: Deployment track: stable, candidate or shadow; may be repeated.
        labels: With the labels known by now.
        start: First moment of arrival, such as 2026-11-01T00:00Z.
        end: First moment after the window.

    Raises:
        ConfigurationError: the file's name is wrong, or no request of the model is logged.
        StorageError: the disk refused a write.
    """
    import pyarrow as pa

    from tasks.predictions.labels import LABEL, JoinTally, labelled_rows
    from tasks.predictions.reading import (
        LogQuery,
        ReadTally,
        logged_columns,
        read_rows,
        write_window,
    )

    home, read, joined = context.home, ReadTally(), JoinTally()
    window, answered = optional_window(start, end), True if labels else None
    query = LogQuery(model, window, versions=version, tracks=track, answered=answered)
    if file.suffix in (".parquet", ".csv"):
        _check_model(home, model)
    schema = logged_columns(home, model, window)
    if not labels:
        num_rows = write_window(read_rows(home, query, schema.names, tally=read), schema, file)
        return [row("Written", f"{num_rows:,} rows to {file}"), *read.damaged]
    now = datetime.now(UTC)
    rows = labelled_rows(home, query, schema.names, known_by=now, tally=joined, read=read)
    num_rows = write_window(rows, schema.append(pa.field(LABEL, pa.float64())), file)
    return [
        row("Written", f"{num_rows:,} rows to {file}"),
        *read.damaged,
        f"{'Labels':<10}{joined.labelled:,} rows have one, {joined.unlabelled:,} none; "
        f"{joined.corrected:,} were corrected, {joined.conflicting:,} contradict each other, "
        f"{joined.unmatched:,} matched no row",
    ]


def _check_model(home: Path, model: str) -> None:
    """Refuse a model of which nothing was ever logged: a misspelt name would export no rows."""
    from tasks.predictions.schema import logged_models

    if model not in (known := logged_models(home)):
        raise ConfigurationError(
            f"nothing is logged of a model {model!r}; there is {', '.join(sorted(known)) or 'none'}"
            ". Nothing was written"
        )


@app.command
def label(model: str, file: Path, /, *, context: Here) -> list[str]:
    """Import a Parquet table of labels.

    Args:
        model: Registered model.
        file: Columns label, and request_id (and request_row) or entity keys and event_timestamp;
            known_at if known.

    Raises:
        DataContractError: the table holds no labels.
    """
    from tasks.predictions.labels import import_labels

    taken = import_labels(context.home, model, file, datetime.now(UTC))
    return [
        row("Labels", f"{taken.rows:,} by {taken.kind}, {taken.without_label:,} rows had none"),
        row("Kept", taken.file),
    ]


@app.command
def erase(subject: str, /, *, model: str | None = None, context: Here) -> list[str]:
    """Remove all rows that one subject requested, for good.

    Args:
        subject: As column `subject` has it: who requested.
        model: Of this model only.

    Raises:
        DataContractError: some files of the log could not be read.
    """
    from tasks.features.access.audit import AuditTrail
    from tasks.predictions.schema import open_mask
    from tasks.predictions.upkeep import erase_subject

    # The trail names nobody: a digest that only this installation can compare.
    named = open_mask(context.home).text(subject)
    facts: dict[str, Any] = {"subject_digest": named, "model": model}
    with AuditTrail(context.home / "audit").recorded("erase-predictions", **facts) as act:
        erasure = erase_subject(context.home, subject, model)
        act.update(rows=erasure.rows, labels=erasure.labels, unread_parts=len(erasure.unread))
    if erasure.unread:
        raise DataContractError(
            f"{erasure.rows:,} rows and {erasure.labels:,} labels were erased, but not everything "
            f"could be read: {'; '.join(erasure.unread)}"
        )
    return [
        row("Erased", f"{erasure.rows:,} rows of {erasure.parts:,} files; {erasure.labels} labels"),
        row("Audit", named),
        "A running server may still hold rows of the last seconds: run this again in a minute.",
    ]
