"""What is written once, what is passed on, and what happens where that fails."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.kernel.errors import ConfigurationError, StorageError
from tasks.kernel.settings import ArtifactStore
from tasks.lineage.config import LineageSettings
from tasks.lineage.journal import Journal
from tasks.lineage.record import Recorded, record_events, record_steps
from tasks.lineage.steps import Step
from tests.support.reporting.examples import COMMIT, PARENT, STARTED, linked_record, steps_of


@pytest.fixture
def steps(store: ArtifactStore) -> list[Step]:
    return steps_of(linked_record(store))


def record(steps: list[Step], settings: LineageSettings, store: ArtifactStore) -> Recorded:
    return record_steps(steps, PARENT, STARTED, settings, store, COMMIT)


@contextmanager
def collector(answers: list[int] | None = None) -> Iterator[tuple[str, list[Any]]]:
    """A server that takes events; gives the status codes of `answers`, then 201."""
    taken: list[Any] = []
    codes = list(answers or [])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = codes.pop(0) if codes else 201
            taken.append((code, self.path, self.headers.get("Authorization"), json.loads(body)))
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()
            thread.join()


def test_a_step_told_again_is_written_once(
    steps: list[Step], settings: LineageSettings, store: ArtifactStore
) -> None:
    first = record(steps, settings, store)
    journal = Journal(settings.folder)
    written = list(journal.events())
    again = record(steps, settings, store)
    assert first.num_new == len(written) / 2 == 20
    assert (again.num_new, again.num_known) == (0, 20)
    assert list(journal.events()) == written


def test_a_line_cut_off_by_a_kill_spoils_no_other_and_events_are_only_ever_appended(
    settings: LineageSettings, caplog: pytest.LogCaptureFixture
) -> None:
    record_events([{"n": 1}], settings)
    (file,) = settings.folder.glob("events-*.jsonl")
    with file.open("a") as stream:
        stream.write('{"n": 2, "cut')
    before = file.read_bytes()
    record_events([{"n": 3}], settings)
    assert file.read_bytes().startswith(before)
    with caplog.at_level(logging.WARNING):
        assert [e["n"] for e in Journal(settings.folder).events()] == [1, 3]
    assert "1 line(s) are cut off or spoilt" in caplog.text
    assert "the first is line 2" in caplog.text


def test_lines_that_are_no_events_spoil_no_other_and_are_counted(
    settings: LineageSettings, caplog: pytest.LogCaptureFixture
) -> None:
    record_events([{"n": 1}], settings)
    (file,) = settings.folder.glob("events-*.jsonl")
    with file.open("ab") as stream:
        stream.write(b"\xff\nnull\n[1]\n")
    record_events([{"n": 2}], settings)
    (settings.folder / "outbox.jsonl").write_bytes(b'\xff\n{"n": 3}\n')
    (settings.folder / "runs.txt").write_bytes(b"\xff\nknown\n")
    journal = Journal(settings.folder)
    with caplog.at_level(logging.WARNING):
        assert [e["n"] for e in journal.events()] == [1, 2]
    assert "3 line(s) are cut off or spoilt" in caplog.text
    assert journal.outbox == [{"n": 3}]
    assert "known" in journal.known_runs()


def test_a_killed_write_is_told_again_under_the_same_run_ids(
    steps: list[Step], settings: LineageSettings, store: ArtifactStore
) -> None:
    record(steps, settings, store)
    (settings.folder / "runs.txt").unlink()  # killed before the ids were written
    record(steps, settings, store)
    ids = [e["run"]["runId"] for e in Journal(settings.folder).events()]
    assert len(ids) == 80
    assert len(set(ids)) == 20


def test_a_collector_gets_every_event_with_the_key(
    steps: list[Step], settings: LineageSettings, store: ArtifactStore
) -> None:
    with collector() as (url, taken):
        done = record(steps, replace(settings, url=url, api_key="k3y"), store)
    assert done.num_waiting == 0
    assert {(path, key) for _, path, key, _ in taken} == {("/api/v1/lineage", "Bearer k3y")}
    assert [event for *_, event in taken] == list(Journal(settings.folder).events())
    files = "".join(f.read_text() for f in settings.folder.iterdir())
    assert "k3y" not in files


def test_events_wait_for_a_collector_that_is_away_and_keep_their_order(
    settings: LineageSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with collector([201, 503]) as (url, taken):
        at = replace(settings, url=url)
        with caplog.at_level(logging.WARNING):
            assert record_events([{"n": n} for n in range(3)], at).num_waiting == 2
        assert "HTTP 503" in caplog.text
        assert record_events([{"n": 3}], at).num_waiting == 0
    assert [event["n"] for code, *_, event in taken if code == 201] == [0, 1, 2, 3]
    assert Journal(settings.folder).outbox == []


def test_a_collector_that_is_gone_or_refuses_for_good_holds_up_nothing(
    settings: LineageSettings,
) -> None:
    with collector([422]) as (url, taken):
        at = replace(settings, url=url)
        assert record_events([{"n": 1}, {"n": 2}], at).num_waiting == 0
    assert [code for code, *_ in taken] == [422, 201]
    assert record_events([{"n": 3}], at).num_waiting == 1
    assert [e["n"] for e in Journal(settings.folder).events()] == [1, 2, 3]


def test_events_and_key_do_not_follow_a_redirect(settings: LineageSettings) -> None:
    with collector([302]) as (url, taken):
        at = replace(settings, url=url, api_key="k3y")
        assert record_events([{"n": 1}], at).num_waiting == 1
    assert len(taken) == 1


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(
    settings: LineageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="the disk refused a write"):
        record_events([{"n": 1}], settings)


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    plain = LineageSettings.from_environment({"FALAJ_HOME": str(tmp_path)})
    assert plain == LineageSettings(folder=tmp_path / "lineage")
    full = LineageSettings.from_environment(
        {
            "FALAJ_HOME": str(tmp_path),
            "FALAJ_LINEAGE_NAMESPACE": "bank",
            "FALAJ_LINEAGE_OWNER": "team:risk",
            "OPENLINEAGE_URL": "https://lineage.bank.example",
            "OPENLINEAGE_API_KEY": "k3y",
        }
    )
    assert (full.namespace, full.owner, full.api_key) == ("bank", "team:risk", "k3y")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("lineage.bank.example", "is no address"),
        ("ftp://lineage.bank.example", "is no address"),
        ("https://user:secret@lineage.bank.example", "holds a user or password"),
        ("http://lineage.bank.example", "would travel readable"),
    ],
)
def test_an_unsafe_collector_is_refused_without_showing_its_secrets(
    tmp_path: Path, url: str, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        LineageSettings.from_environment(
            {"FALAJ_HOME": str(tmp_path), "OPENLINEAGE_URL": url, "OPENLINEAGE_API_KEY": "k3y"}
        )
    assert "secret" not in str(caught.value)
    assert "k3y" not in str(caught.value)
