"""The report in the Prefect UI."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.kernel.settings import ArtifactStore
from tasks.reporting.figures import Pictures
from tasks.reporting.files import announcement, write_report
from tests.support.reporting.run_records import hostile_record, run_record


def test_the_announcement_gives_results_figures_and_the_place(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    record = run_record(store)
    files = write_report(record, store, tmp_path / "reports")
    text = announcement(record, files)
    for words in ("Promoted: version 3", "Drift: watch", "0.752", "report.html", "report.json"):
        assert words in text.replace("&#95;", "_"), words
    assert "](http" not in text
    linked = announcement(record, files, "http://127.0.0.1:5000/reports")
    assert f"[The report](http://127.0.0.1:5000/reports/{record.run_id}/report.html)" in linked


def test_names_out_of_the_data_are_neither_markdown_nor_html(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    record = hostile_record(store)
    text = announcement(record, write_report(record, store, tmp_path / "reports"))
    assert not re.search(r"<(?!/?b>)", text)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") == 4 for line in rows), "no name adds a cell"


def test_the_gallery_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    assert set(Pictures(run_record(store)).gallery()) == {
        "calibration", "roc", "learning-curve", "drift", "latency", "lineage",
        "trade-1", "trade-2", "trade-3", "trade-4",
    }  # fmt: skip
    assert "latency" not in Pictures(hostile_record(store)).gallery()
