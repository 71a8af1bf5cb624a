"""The report on disk: whole, repeatable, never pointing at an older run, refused in a sentence."""

import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from tasks.contracts.run import RunRecord
from tasks.governance.journal import Journal
from tasks.kernel.errors import ConfigurationError, StorageError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, named_artifacts
from tasks.reporting import page as files_module
from tasks.reporting.page import announcement, checks, stored_artifacts, write_report
from tests.support.data.builders import edited
from tests.support.reporting.pages import run_command
from tests.support.reporting.run_records import hostile_record, later, run_record


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "state" / "artifacts")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return tmp_path / "state" / "reports"


def facts_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_the_facts_hold_the_whole_record(store: ArtifactStore, reports: Path) -> None:
    record = run_record(store)
    facts = facts_in(write_report(record, store, reports).facts_path)
    assert facts.pop("schema_version") == 1
    assert facts.pop("damaged") == []
    facts.pop("paths")
    assert RunRecord.model_validate(facts) == record


def test_a_stranger_finds_every_artifact_by_its_path_in_the_state_folder(
    store: ArtifactStore, reports: Path
) -> None:
    record = run_record(store)
    written = write_report(record, store, reports)
    paths = facts_in(written.facts_path)["paths"]
    for artifact in named_artifacts(record):
        assert not Path(paths[artifact.uri]).is_absolute()
        assert digest_of(store.root.parent / paths[artifact.uri]) == artifact.sha256
    assert str(store.root.parent) not in written.facts_path.read_text()
    assert str(store.root.parent) not in written.page_path.read_text(), "no path of this machine"


@pytest.mark.slow
def test_the_commands_on_the_page_give_what_they_claim(store: ArtifactStore) -> None:
    record = run_record(store)
    found = {c.claim: c for c in checks(record, stored_artifacts(record, store))}
    predictions = store.path(record.evaluation.predictions)
    rows = pd.read_parquet(predictions).rename(columns={"label": "is_late"})
    rows.to_parquet(predictions)
    home = store.root.parent
    told = run_command(found["AUC"].command, home)
    assert float(told) == pytest.approx(roc_auc_score(rows.is_late, rows.score))
    digest, _ = run_command(found["Digest of the model"].command, home).split()
    assert digest == record.model.program.sha256


def test_a_column_name_cannot_smuggle_a_command_into_the_page(store: ArtifactStore) -> None:
    record = run_record(store)
    evil = "x'; touch gone; echo '"
    changed = edited(record, "dataset.snapshot.columns.label", evil)
    for check in checks(changed, stored_artifacts(changed, store)):
        assert len(shlex.split(check.command)) <= 3, check.command


def test_a_damaged_and_an_absent_artifact_are_named(store: ArtifactStore, reports: Path) -> None:
    record = run_record(store)
    store.path(record.model.program).write_text("changed")
    store.path(record.model.log).unlink()
    facts = facts_in(write_report(record, store, reports).facts_path)
    assert facts["damaged"] == sorted([record.model.program.uri, record.model.log.uri])


def test_a_run_that_shows_the_same_finds_its_pictures(store: ArtifactStore, reports: Path) -> None:
    record = run_record(store)
    write_report(record, store, reports)
    builds = store.num_builds
    page = write_report(later(record, 1, "again"), store, reports).page_path.read_text()
    assert store.num_builds == builds
    assert "<svg" in page
    other = record.model_copy(update={"variants": record.variants[:1]})
    write_report(later(other, 2, "other"), store, reports)
    assert store.num_builds == builds + 1


def test_the_head_says_who_broke_the_glass_before_the_run(
    store: ArtifactStore, reports: Path
) -> None:
    broken = {"said": "the site is down", "acts": "approve", "who": {"subject": "omar"}}
    Journal(store.root.parent / "audit").append("break-glass", **broken)
    for days, is_shown in ((0, True), (-1, False), (31, False)):
        started = datetime.now(UTC) + timedelta(days=days)
        record = run_record(store).model_copy(update={"started": started})
        page = write_report(record, store, reports).page_path.read_text()
        assert ("omar broke the glass to approve" in page) is is_shown


def test_writing_twice_changes_nothing(store: ArtifactStore, reports: Path) -> None:
    record = run_record(store)
    first = write_report(record, store, reports)
    before = {path: path.read_bytes() for path in reports.rglob("*") if path.is_file()}
    assert write_report(record, store, reports) == first
    assert {p: p.read_bytes() for p in reports.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in reports.iterdir()) == [record.run_id, "latest", "newest"]


def test_latest_leads_to_the_run_that_started_last(store: ArtifactStore, reports: Path) -> None:
    first = run_record(store)
    newer = later(first, 60, "newer")
    older = later(first, -60, "older")
    for record, expected in ((first, first.run_id), (newer, "newer"), (older, "newer")):
        written = write_report(record, store, reports)
        assert (reports / "latest").readlink() == Path(expected)
        assert written.latest_path.is_file()
    assert (reports / "older" / "report.html").is_file()


@pytest.mark.parametrize("content", [None, "", '{"started": 3}', '{"started": "2999-01-01"}'])
def test_a_latest_that_cannot_be_read_is_replaced_and_a_newer_one_stays(
    store: ArtifactStore, reports: Path, content: str | None
) -> None:
    record = run_record(store)
    (reports / "broken").mkdir(parents=True)
    if content is not None:
        (reports / "broken" / "report.json").write_text(content)
    (reports / "latest").symlink_to("broken")
    write_report(record, store, reports)
    newest = "broken" if content and "2999" in content else record.run_id
    assert (reports / "latest").readlink() == Path(newest)


def test_a_folder_in_the_place_of_latest_is_left_alone(store: ArtifactStore, reports: Path) -> None:
    (reports / "latest").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"expected a link .* is whole in .* Move"):
        write_report(run_record(store), store, reports)
    assert (reports / "latest").is_dir()


@pytest.mark.parametrize("run_id", ["", "../up", "a/b", ".hidden", "latest", "a" * 129, "a\n", "ü"])
def test_a_run_id_that_cannot_name_a_folder_is_refused(
    store: ArtifactStore, reports: Path, run_id: str
) -> None:
    with pytest.raises(ConfigurationError, match="No report was written"):
        write_report(later(run_record(store), 0, run_id), store, reports)
    assert not reports.exists()


def test_a_report_killed_between_its_files_is_never_the_latest(
    store: ArtifactStore, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_record(store)
    monkeypatch.setattr(files_module, "render_page", lambda *_: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        write_report(record, store, reports)
    assert not (reports / "latest").exists()
    monkeypatch.undo()
    assert write_report(record, store, reports).latest_path.is_file()


def test_the_announcement_gives_results_figures_and_the_place(
    store: ArtifactStore, reports: Path
) -> None:
    record = run_record(store)
    files = write_report(record, store, reports)
    text = announcement(record, files)
    for words in ("Promoted: version 3", "Drift: watch", "0.752", "report.html", "report.json"):
        assert words in text.replace("&#95;", "_"), words
    assert "](http" not in text
    linked = announcement(record, files, "http://127.0.0.1:5000/reports")
    assert f"[The report](http://127.0.0.1:5000/reports/{record.run_id}/report.html)" in linked


def test_names_out_of_the_data_are_neither_markdown_nor_html(
    store: ArtifactStore, reports: Path
) -> None:
    record = hostile_record(store)
    text = announcement(record, write_report(record, store, reports))
    assert not re.search(r"<(?!/?b>)", text)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") == 4 for line in rows), "no name adds a cell"
