"""What is written once, what a collector gets, and what happens where that fails."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore
from tasks.lineage.journal import Journal, LineageSettings
from tasks.lineage.steps import Step
from tests.support.reporting.examples import COMMIT, PARENT, STARTED, linked_record, steps_of
from tests.support.services.listeners import Answer, Asked, http_listener


@pytest.fixture
def steps(store: ArtifactStore) -> list[Step]:
    return steps_of(linked_record(store))


def record(steps: list[Step], journal: Journal) -> int:
    return journal.record_steps(steps, PARENT, STARTED, COMMIT)


def sending(journal: Journal, url: str) -> Journal:
    return Journal(LineageSettings(journal.folder, url=url, api_key="k3y"))


@contextmanager
def collector(answers: list[int] | None = None) -> Iterator[tuple[str, list[Any]]]:
    """A server that takes events; gives the status codes of `answers`, then 201."""
    taken: list[Any] = []
    codes = list(answers or [])

    def answer(asked: Asked) -> Answer:
        code = codes.pop(0) if codes else 201
        key = asked.headers.get("Authorization")
        taken.append((code, asked.path, key, json.loads(asked.body)))
        return code, "text/plain", b"http://127.0.0.1:1/elsewhere"

    with http_listener(answer) as url:
        yield url, taken


def test_a_step_recorded_again_is_written_once(steps: list[Step], journal: Journal) -> None:
    assert record(steps, journal) == 20
    written = list(journal.events())
    assert len(written) == 40
    assert record(steps, journal) == 0
    assert list(journal.events()) == written
    (journal.folder / "runs.txt").unlink()  # killed before the ids were written
    record(steps, journal)
    assert len({e["run"]["runId"] for e in journal.events()}) == 20


def test_spoilt_lines_spoil_no_other_and_events_are_only_ever_appended(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.record([{"n": 1}])
    (file,) = journal.folder.glob("events-*.jsonl")
    with file.open("ab") as stream:
        stream.write(b'\xff\nnull\n{"n": 2, "cut')
    before = file.read_bytes()
    journal.record([{"n": 3}])
    assert file.read_bytes().startswith(before)
    with caplog.at_level(logging.WARNING):
        assert [e["n"] for e in journal.events()] == [1, 3]
    assert "3 line(s)" in caplog.text


def test_a_collector_gets_every_event_with_the_key(steps: list[Step], journal: Journal) -> None:
    with collector() as (url, taken):
        record(steps, sending(journal, url))
    assert journal.outbox == []
    assert {(path, key) for _, path, key, _ in taken} == {("/api/v1/lineage", "Bearer k3y")}
    assert [event for *_, event in taken] == list(journal.events())
    assert "k3y" not in "".join(f.read_text() for f in journal.folder.iterdir())


def test_events_wait_for_a_collector_that_is_away_and_keep_their_order(journal: Journal) -> None:
    with collector([201, 503, 302]) as (url, taken):
        sending(journal, url).record([{"n": n} for n in range(3)])
        assert len(journal.outbox) == 2
        sending(journal, url).record([])
        assert len(journal.outbox) == 2, "a redirect is not followed"
        sending(journal, url).record([{"n": 3}])
    assert [event["n"] for code, *_, event in taken if code == 201] == [0, 1, 2, 3]
    assert journal.outbox == []


def test_a_collector_that_is_gone_or_refuses_for_good_holds_up_nothing(journal: Journal) -> None:
    with collector([422]) as (url, taken):
        sending(journal, url).record([{"n": 1}, {"n": 2}])
        assert journal.outbox == []
    assert [code for code, *_ in taken] == [422, 201]
    sending(journal, url).record([{"n": 3}])
    assert journal.outbox == [{"n": 3}]
    assert [e["n"] for e in journal.events()] == [1, 2, 3]


@pytest.mark.parametrize(
    "url",
    [
        "lineage.bank.example",
        "ftp://lineage.bank.example",
        "https://user:secret@lineage.bank.example",
        "http://lineage.bank.example",
    ],
)
def test_an_unsafe_collector_is_refused_without_showing_its_secrets(
    tmp_path: Path, url: str
) -> None:
    given = {"FALAJ_HOME": str(tmp_path), "OPENLINEAGE_URL": url, "OPENLINEAGE_API_KEY": "k3y"}
    with pytest.raises(ConfigurationError, match="OPENLINEAGE_URL") as caught:
        LineageSettings.from_environment(given)
    assert "secret" not in str(caught.value)
    assert "k3y" not in str(caught.value)
