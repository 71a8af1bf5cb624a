import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.governance import journal as audit
from tasks.governance.journal import Journal
from tasks.governance.verification import verify
from tasks.kernel.errors import StorageError
from tasks.kernel.settings import put
from tests.support.state import act, appending, faults


@pytest.fixture
def trail(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "audit")


def the_file(trail: Journal) -> Path:
    (file,) = trail.folder.glob("journal-*.jsonl")
    return file


def with_lines(trail: Journal, count: int) -> list[bytes]:
    act(trail, count)
    return the_file(trail).read_bytes().splitlines(keepends=True)


def changed(line: bytes) -> bytes:
    return line.replace(b'"rows":', b'"rows":7')


@pytest.mark.parametrize(
    "tampered",
    [
        lambda lines: lines[1:],
        lambda lines: [*lines[:2], *lines[3:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:2], changed(lines[2]), *lines[3:]],
        lambda lines: [*lines[:4], changed(lines[4])],
        lambda lines: lines[:4],
        lambda lines: lines[:3],
        lambda lines: [],
    ],
    ids=["first", "middle", "order", "changed", "newest-changed", "newest", "newest-two", "all"],
)
def test_tampering_is_noticed_at_once_and_after_later_acts_too(
    trail: Journal, tampered: Callable[[list[bytes]], list[bytes]]
) -> None:
    lines = tampered(with_lines(trail, 5))
    the_file(trail).write_bytes(b"".join(lines))
    assert verify(trail).faults
    with_lines(trail, 3)
    assert verify(trail).faults


@pytest.mark.parametrize("count", [1, 4])
def test_a_removed_head_is_noticed_after_later_acts_too(trail: Journal, count: int) -> None:
    with_lines(trail, count)
    (trail.folder / "head.json").unlink()
    assert faults(trail) == [("unsigned", "head.json")]
    with_lines(trail, 2)
    assert faults(trail) == [("changed", f"{the_file(trail).name} line {count + 2}")]


@pytest.mark.parametrize(
    ("earlier", "num_lines"), [(0, 1), (0, 2), (3, 5)], ids=["beginning", "first", "later"]
)
def test_an_act_that_is_killed_before_the_head_leaves_no_fault(
    trail: Journal, monkeypatch: pytest.MonkeyPatch, earlier: int, num_lines: int
) -> None:
    written = put
    act(trail, earlier)

    def killed(path: Path, text: str) -> None:
        if len(the_file(trail).read_bytes().splitlines()) == num_lines:
            raise KeyboardInterrupt
        written(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(audit, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            act(trail)
    assert verify(trail).faults == ()
    with_lines(trail, 2)
    assert (verify(trail).num_lines, verify(trail).faults) == (num_lines + 2, ())


def test_a_disk_that_fills_in_a_line_refuses_it_and_keeps_no_part_of_it(
    trail: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lines(trail, 2)
    write, room = os.write, [10]

    def into_little_room(descriptor: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, bytes(content)[: room[0]])
        room[0] -= taken
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", into_little_room)
        with pytest.raises(StorageError, match="No space left"):
            act(trail)
    assert (verify(trail).num_lines, verify(trail).faults) == (3, ())
    with_lines(trail, 1)
    assert (verify(trail).num_lines, verify(trail).faults) == (4, ())


def test_the_chain_goes_on_in_the_next_month_and_a_missing_month_is_noticed(trail: Journal) -> None:
    with_lines(trail, 3)
    earlier = the_file(trail).rename(trail.folder / "journal-2013-01.jsonl")
    act(trail)
    assert verify(trail).faults == ()
    assert verify(trail).num_lines == 5
    shutil.move(earlier, trail.folder / "elsewhere")
    assert faults(trail) == [("cut", f"{the_file(trail).name} line 1")]


def test_a_line_that_a_power_cut_tore_is_told_and_spoils_no_later_one(trail: Journal) -> None:
    with_lines(trail, 2)
    with the_file(trail).open("ab") as stream:
        stream.write(b'{"time":"2013-')
    act(trail)
    assert faults(trail) == [("changed", f"{the_file(trail).name} line 4")]


def test_processes_that_append_at_once_keep_one_chain(trail: Journal) -> None:
    writers = [appending(trail, 50) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    assert verify(trail).faults == ()
    assert [line.content["number"] for line in trail.lines()] == [*range(1, 202)]
    assert len({line.content["who"]["process"] for line in trail.lines()}) == 4


def test_only_the_owner_may_read_the_trail(trail: Journal) -> None:
    trail.folder.mkdir(mode=0o755)
    act(trail)
    assert trail.folder.stat().st_mode & 0o777 == 0o700
    assert the_file(trail).stat().st_mode & 0o777 == 0o600


def test_an_act_that_fails_is_recorded_with_its_kind_of_error_and_not_its_text(
    trail: Journal,
) -> None:
    def fail() -> None:
        with trail.recorded("historical-read", subject={"views": ["weather"]}):
            raise ValueError("tail number N14228")

    with pytest.raises(ValueError, match="N14228"):
        fail()
    *_, line = trail.lines()
    assert line.content["outcome"] == "failed: ValueError"
    assert b"N14228" not in line.text


def test_what_cannot_be_recorded_is_not_done(trail: Journal) -> None:
    trail.folder.parent.mkdir(exist_ok=True)
    trail.folder.write_text("a file where the folder should be")
    done = []
    with pytest.raises(StorageError), trail.recorded("push"):
        done.append("push")
    assert not done


def earlier_trail(folder: Path, count: int) -> Path:
    """A trail of a use case, as it was kept before there was one journal."""
    folder.mkdir(parents=True)
    previous, lines = "0" * 64, []
    for number in range(count):
        lines.append(json.dumps({"action": "apply", "rows": number, "previous": previous}))
        previous = hashlib.sha256(lines[-1].encode()).hexdigest()
    (folder / "head.json").write_text(json.dumps({"digest": previous, "time": "2026"}))
    file = folder / "features-2026-01.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_trails_of_before_stay_readable_and_what_is_done_to_them_later_is_found(
    trail: Journal,
) -> None:
    home = trail.folder.parent
    shared = earlier_trail(home / "audit", 3)
    own = earlier_trail(home / "use_cases" / "traffic" / "audit", 2)
    with_lines(trail, 2)
    assert (verify(trail).num_lines, verify(trail).faults) == (3, ())
    lines = own.read_text().splitlines(keepends=True)
    own.write_text(lines[0])
    shared.write_text(shared.read_text().replace('"rows": 0', '"rows": 9'))
    assert faults(trail) == [
        ("changed", "audit/features-2026-01.jsonl"),
        ("changed", "use_cases/traffic/audit/features-2026-01.jsonl"),
    ]
