"""The report in a few lines of Markdown, for the Prefect UI."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from tasks.contracts.run import RunRecord
from tasks.reporting.facts import drift_verdict, key_figures, promotion_verdict
from tasks.reporting.files import ReportFiles
from tasks.reporting.quantities import printable

_SPECIAL = str.maketrans({c: f"&#{ord(c)};" for c in "\\`*_[]|~"})


def announcement(record: RunRecord, files: ReportFiles, address: str | None = None) -> str:
    """Verdicts, key figures and where the page lies; names out of the data stay plain text.

    Args:
        record: what the run did.
        files: its report.
        address: where a platform shows all reports; None where none runs.
    """
    lines = [f"## {_plain(record.use_case)}: {_plain(record.question)}", ""]
    for verdict in (promotion_verdict(record), drift_verdict(record)):
        lines.append(f"- **{_plain(verdict.headline)}.** {_plain(verdict.detail)}")
    lines += ["", "| figure | value | |", "| --- | --- | --- |"]
    for tile in key_figures(record):
        value = f"{tile.value} {tile.interval}".strip()
        lines.append(f"| {_plain(tile.title)} | {_plain(value)} | {_plain(tile.note)} |")
    if address:
        page = f"{address}/{quote(record.run_id)}/{quote(files.page_path.name)}"
        lines += ["", f"[The report]({page}) (asks for the platform's user and password)"]
    lines += ["", f"Page: {_plain(files.page_path)}", "", f"Facts: {_plain(files.facts_path)}"]
    return "\n".join(lines)


def _plain(text: object) -> str:
    """Text that neither Markdown nor HTML reads as anything else, on one line."""
    return escape(" ".join(printable(text).split()), quote=False).translate(_SPECIAL)
