"""The owner of a state, who may sign, cannot rewrite its journal without shipped heads telling."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.governance import journal as audit
from tasks.governance.journal import AUDIT, BEGIN, Head, Journal, name_of, read_head, shipped_name
from tasks.governance.verification import verify
from tasks.kernel.errors import ArtifactError, FalajError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.location import Location
from tests.support.state import act, appending, faults

Content = dict[str, object]


@pytest.fixture
def place(url: str, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Where heads are shipped, at each act."""
    monkeypatch.setenv(AUDIT, url)
    monkeypatch.setattr(audit, "SHIP_EVERY_S", 0)
    monkeypatch.setattr(audit, "SHIP_WITHIN_S", 60)  # a busy machine's store is slow
    return Location.of(url, AUDIT)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "home" / "audit")


def contents(journal: Journal) -> list[Content]:
    return [line.content for line in journal.lines()]


def forge(journal: Journal, lines: list[Content], keys: FileKeys | None = None) -> Head:
    """Write the journal anew from these lines, each with a valid digest, and sign the head."""
    name, digest, texts = "", audit.BEGINNING, []
    for number, line in enumerate(lines, start=1):
        text = json.dumps({**line, "number": number, "previous": digest}, separators=(",", ":"))
        texts.append(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = name_of(name, digest) if line["action"] == BEGIN else name
    (file,) = journal.folder.glob("journal-*.jsonl")
    file.write_text("".join(f"{text}\n" for text in texts))
    signing = Journal(journal.folder)
    signing.keys = keys or journal.keys
    seen = {"journal": name, "number": len(lines), "digest": digest}
    head = signing._signed(read_head(journal.folder) or Head(**seen), seen)
    (journal.folder / "head.json").write_text(head.model_dump_json())
    return head


@pytest.mark.parametrize(
    ("forged", "kind", "line"),
    [
        (lambda lines: [*lines[:3], {**lines[3], "rows": 77}, *lines[4:]], "changed", 4),
        (lambda lines: [*lines[:2], *lines[3:]], "changed", 3),
        (lambda lines: lines[:4], "cut", 4),
        (lambda lines: [{**lines[0], "time": "2013"}, *lines[1:]], "forked", None),
    ],
    ids=["edited", "removed", "cut", "begun-anew"],
)
@pytest.mark.parametrize("ships_too", [False, True])
def test_what_its_owner_writes_anew_and_signs_is_found_by_shipped_heads_alone(
    place: Location,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    forged: Callable[[list[Content]], list[Content]],
    kind: str,
    line: int | None,
    ships_too: bool,
) -> None:
    act(journal, 5)
    before = verify(journal)
    assert (before.faults, before.num_shipped, before.num_uncovered) == ((), 6, 0)
    head = forge(journal, forged(contents(journal)))
    if ships_too:
        place.create(shipped_name(head.journal, 7), head.model_dump_json().encode())
    (file,) = journal.folder.glob("journal-*.jsonl")
    where = f"{file.name} line {line}" if line else f"heads/{before.journal}"
    assert (kind, where) in faults(journal)
    monkeypatch.delenv(AUDIT)
    alone = verify(journal)
    assert (alone.faults, alone.num_shipped) == ((), None)  # as the manual says


def test_of_two_copies_that_go_on_the_second_is_refused_until_it_has_a_name_of_its_own(
    place: Location, journal: Journal, tmp_path: Path
) -> None:
    act(journal, 2)
    copy = Journal(shutil.copytree(tmp_path / "home", tmp_path / "copy") / "audit")
    act(journal)
    done = []
    with pytest.raises(ArtifactError, match="falaj audit begin"), copy.recorded("push"):
        done.append("push")
    assert (done, len(contents(copy))) == ([], 3)
    name = copy.begin("restored")
    act(copy, 2)
    assert verify(journal).faults == ()
    found = verify(copy)
    assert (found.journal, found.faults[0].kind) == (name, "forked")
    assert verify(copy, [name.partition(".")[0]]).faults == ()


def test_an_original_is_refused_where_its_copy_was_the_first_to_go_on(
    place: Location, journal: Journal, tmp_path: Path
) -> None:
    act(journal, 2)
    copy = Journal(shutil.copytree(tmp_path / "home", tmp_path / "copy") / "audit")
    act(copy)  # it is the first to go on, so the original is the one that is refused
    act(journal)
    with pytest.raises(ArtifactError):
        act(journal)


def test_where_the_location_is_away_acts_go_on_and_verify_says_what_is_not_covered(
    place: Location, journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    act(journal, 2)
    url = os.environ[AUDIT]
    (tmp_path / "file").touch()
    monkeypatch.setenv(AUDIT, (tmp_path / "file").as_uri())
    act(journal, 2)
    with pytest.raises(FalajError):
        verify(journal)
    monkeypatch.setenv(AUDIT, url)
    assert verify(journal).num_uncovered == 2
    act(journal)
    assert verify(journal).num_uncovered == 3  # this process waits before it tries again
    journal.ship()
    assert verify(journal).num_uncovered == 0


def test_a_process_killed_after_it_shipped_a_head_is_no_fork(
    place: Location, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(journal, 3)
    head = read_head(journal.folder)
    assert head is not None
    unnoted = journal._signed(head, {"shipped": head.shipped - 2})
    (journal.folder / "head.json").write_text(unnoted.model_dump_json())
    monkeypatch.setattr(audit, "_next_ships_s", {})
    act(journal)
    assert (verify(journal).faults, verify(journal).num_shipped) == ((), 5)


def test_heads_that_a_foreign_key_signed_or_that_were_removed_are_told(
    place: Location, journal: Journal, tmp_path: Path
) -> None:
    act(journal, 3)
    foreign = FileKeys(tmp_path / "foreign")
    head = forge(journal, contents(journal), foreign)
    place.create(shipped_name(head.journal, 5), head.model_dump_json().encode())
    place.remove([shipped_name(head.journal, 2)])
    assert faults(journal) == [
        ("unsigned", "head.json"),
        ("cut", shipped_name(head.journal, 2)),
        ("unsigned", shipped_name(head.journal, 5)),
    ]


def test_processes_at_once_ship_one_row_of_heads(place: Location, journal: Journal) -> None:
    writers = [appending(journal, 20) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    found = verify(journal)
    assert (found.faults, found.num_lines) == ((), 61)
    assert found.num_shipped in range(61, 65)  # each ships once more when it ends


def test_a_process_ships_once_a_second_and_when_it_ends(place: Location, journal: Journal) -> None:
    assert appending(journal, 20, ships_every_s=3600).wait(120) == 0
    assert 2 <= len(place.entries("heads")) <= 3
    assert verify(journal).num_uncovered == 0
