"""Putting the report where people find it: whole files only, and one address for the newest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from tasks.contracts.run import RunRecord
from tasks.kernel.errors import (
    ConfigurationError,
    StorageError,
    refused_writes_explained,
)
from tasks.kernel.files import write_atomically
from tasks.kernel.scratch import scratch_folder
from tasks.kernel.settings import ArtifactStore
from tasks.kernel.values import plain
from tasks.reporting.facts import drift_result, key_figures, promotion_result
from tasks.reporting.page import StoredArtifact, render_page, stored_artifacts
from tasks.reporting.pictures import Pictures

SCHEMA_VERSION = 1
PAGE, FACTS, LATEST = "report.html", "report.json", "latest"
DATA_DOCS = Path("data_docs") / "current" / "index.html"
"""Place in the state folder; one for all use cases, whose reports lie in folders of their own."""
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ReportFiles:
    """Where one report lies; `latest_path` is the page of the newest run, at a fixed place."""

    page_path: Path
    facts_path: Path
    latest_path: Path


def write_report(
    record: RunRecord, store: ArtifactStore, folder: Path, pictures: Pictures | None = None
) -> ReportFiles:
    """Write `<folder>/<run id>/report.html` and `report.json`, and let `latest` lead to the newest.

    The same record gives the same files, so it can be repeated. The page is written after its
    facts: where there is a page, there are facts. `latest` never goes back to an older run.

    Args:
        record: what the run did.
        store: holds the artifacts that the record names; each is read to check its digest.
        folder: folder of all reports.
        pictures: of the run; they are drawn here where none are given.

    Raises:
        ConfigurationError: the run id cannot be the name of a folder.
        StorageError: the disk refused a write, or something else lies at `latest`.
    """
    _check_run_id(record.run_id)
    stored = stored_artifacts(record, store)
    target = folder / record.run_id
    write_atomically(target / FACTS, facts_as_json(record, stored))
    docs = os.path.relpath(store.root.parent / DATA_DOCS, target)
    write_atomically(target / PAGE, render_page(record, stored, docs, pictures))
    _lead_to(target, folder / LATEST, record.started)
    return ReportFiles(target / PAGE, target / FACTS, folder / LATEST / PAGE)


def facts_as_json(record: RunRecord, stored: Sequence[StoredArtifact]) -> str:
    """The record as JSON, its fields at the top level, so that a stranger can recompute its claims.

    Beside them: `schema_version`; `paths`, the place of each artifact URI below the state folder;
    `damaged`, URIs whose content was absent or not what the digest says when this was written. A
    number that is not finite is null, because JSON has no word for it.
    """
    facts = {
        "schema_version": SCHEMA_VERSION,
        **json.loads(record.model_dump_json()),
        "paths": {s.artifact.uri: s.path for s in stored},
        "damaged": [s.artifact.uri for s in stored if not s.whole],
    }
    return json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _check_run_id(run_id: str) -> None:
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ConfigurationError(
            f"run id {run_id!r} cannot name the report's folder; expected 1 to 128 letters, "
            "digits, dots, dashes and underscores, starting with a letter or digit, and not "
            f"{LATEST!r}. No report was written"
        )


def _lead_to(target: Path, latest: Path, started: datetime) -> None:
    """Swap the link `latest` in one step, unless it leads to a run that started later."""
    if latest.exists() and not latest.is_symlink():
        raise StorageError(
            f"{latest} is a file or folder, expected a link to the newest report; the report "
            f"itself is whole in {target}. Move {latest} away and run again"
        )
    if _started(latest / FACTS) > _in_utc(started):
        return
    with (
        refused_writes_explained(latest),
        scratch_folder(".latest", latest.parent) as aside,
    ):
        link = aside / LATEST
        os.symlink(target.name, link, target_is_directory=True)
        link.replace(latest)


def _started(facts_path: Path) -> datetime:
    """When the run of these facts started; the beginning of time where they cannot be read."""
    try:
        facts = json.loads(facts_path.read_text(encoding="utf-8"))
        return _in_utc(datetime.fromisoformat(facts["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _BEGINNING


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def announcement(record: RunRecord, files: ReportFiles, address: str | None = None) -> str:
    """Results, key figures and where the page lies; names out of the data stay plain text.

    Args:
        record: what the run did.
        files: its report.
        address: where a platform shows all reports; None where none runs.
    """
    lines = [f"## {plain(record.use_case)}: {plain(record.question)}", ""]
    for result in (promotion_result(record), drift_result(record)):
        lines.append(f"- **{plain(result.headline)}.** {plain(result.detail)}")
    lines += ["", "| figure | value | |", "| --- | --- | --- |"]
    for tile in key_figures(record):
        value = f"{tile.value} {tile.interval}".strip()
        lines.append(f"| {plain(tile.title)} | {plain(value)} | {plain(tile.note)} |")
    if address:
        page = f"{address}/{quote(record.run_id)}/{quote(files.page_path.name)}"
        lines += ["", f"[The report]({page}) (asks for the platform's user and password)"]
    lines += ["", f"Page: {plain(files.page_path)}", "", f"Facts: {plain(files.facts_path)}"]
    return "\n".join(lines)
