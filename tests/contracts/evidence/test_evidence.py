"""`falaj evidence`: what is seen of a real state, signed, and what a changed archive is told."""

import json
import re
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest

from falaj.__main__ import app, main
from falaj.governance import evidence
from falaj.governance.evidence import Answer, Control, judge, read_framework
from tasks.governance.journal import Journal
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.signed import signed
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.registry.builders import World
from tests.support.state import told

CATALOGUE = """
title: Small & <plain>
controls:
  - {id: A.1, title: Models, question: Which?, command: falaj models list, needs: [""],
     not_shown: Owners}
  - {id: A.2, title: Journal, question: Whole?, command: falaj audit verify, needs: [journal],
     decides: {faults: []}, not_shown: Readers}
  - {id: A.3, title: Missing, question: Which?, command: falaj models show nosuch 9, not_shown: All}
  - {id: A.4, title: Erased, question: Who?, files: erasures/*-*.json, needs: [""],
     decides: {"*/left": []}, command: falaj erase, not_shown: Others}
"""


@pytest.fixture
def small(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A champion, a journal, a certificate, and a catalogue of four controls."""
    (tmp_path / "catalogues").mkdir()
    (tmp_path / "catalogues" / "small.yaml").write_text(CATALOGUE)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "catalogues")
    world.promoted(0)
    Journal(world.home / "audit").append("note")
    (world.home / "erasures").mkdir()
    certificate = signed(key_store(world.home), {"left": []})
    (world.home / "erasures" / "20260101T000000Z-ab.json").write_text(certificate)
    return world


def collected(capsys: pytest.CaptureFixture[str], out: Path, code: int = 0) -> Any:
    return told(capsys, "evidence", "--framework", "small", "--out", str(out), code=code)


def test_an_archive_holds_what_was_seen_and_each_changed_byte_is_named(
    small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = collected(capsys, tmp_path / "out")
    seen = [each["state"] for each in found["controls"]]
    assert seen == ["shown", "shown", "cannot be shown here", "shown"]
    archive = Path(found["archive"])
    assert archive.stat().st_mode & 0o077 == 0
    answer = json.loads((archive.with_suffix("") / "answers" / "A.3.json").read_text())
    assert (answer["answer"]["code"], answer["answer"]["document"]) == (1, None)
    assert answer["answer"]["said"].startswith("failed: ")
    page = Path(found["page"]).read_text()
    assert "Small &amp; &lt;plain&gt;" in page
    assert 'href="answers/A.3.json"' in page
    whole = told(capsys, "evidence", "--check", str(archive))
    assert (whole["changed"], whole["missing"], whole["added"]) == ([], [], [])
    content, bad = archive.read_bytes(), tmp_path / "bad.zip"
    with zipfile.ZipFile(archive) as opened:
        infos = opened.infolist()
    for info in infos:
        begin = info.header_offset + 30 + len(info.filename)
        for place in (begin, begin + info.compress_size // 2, begin + info.compress_size - 1):
            bad.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            if info.filename == "manifest.json":
                assert main(["evidence", "--check", str(bad)]) in (1, 4)
            else:
                seen = told(capsys, "evidence", "--check", str(bad), code=4)
                assert seen["changed"] == [info.filename], place


def test_a_well_formed_archive_of_other_content_and_a_foreign_key_are_refused(
    small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Path(collected(capsys, tmp_path)["archive"])
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}

    def check(code: int, **changed: bytes | None) -> str:
        bad = tmp_path / "bad.zip"
        with zipfile.ZipFile(bad, "w") as opened:
            for name, content in {**files, **changed}.items():
                if content is not None:
                    opened.writestr(name, content)
        capsys.readouterr()
        assert main(["evidence", "--check", str(bad)]) == code
        return "".join(capsys.readouterr())

    check(0)
    assert re.search("changed +page.html", check(4, **{"page.html": b"all is well"}))
    assert re.search("missing +answers/A.1.json", check(4, **{"answers/A.1.json": None}))
    assert re.search("added +../evil", check(4, **{"../evil": b"x"}))
    certificate = signed(key_store(small.home), {"left": []}).encode()
    assert "F520" in check(1, **{"manifest.json": certificate})
    check(4, **{"manifest.json": None})
    foreign = signed(
        key_store(tmp_path / "other"), json.loads(json.loads(files["manifest.json"])["content"])
    )
    assert "does not trust" in check(1, **{"manifest.json": foreign.encode()})


def test_a_forged_certificate_a_broken_command_and_a_wrong_name_are_told(
    small: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = signed(key_store(tmp_path / "other"), {"left": []})
    (small.home / "erasures" / "20260102T000000Z-cd.json").write_text(forged)
    catalogue = evidence.FOLDER / "small.yaml"
    catalogue.write_text(CATALOGUE.replace("audit verify", "audit nosuch"))
    found = collected(capsys, tmp_path, code=1)["controls"]
    assert [each["state"] for each in found[1:]] == [
        "could not be run",
        "cannot be shown here",
        "not all well",
    ]
    for name in ("iso", "../small"):
        assert main(["evidence", "--framework", name]) == 2
        assert "there is small" in capsys.readouterr().err


def test_what_is_not_clearly_good_is_not_shown() -> None:
    text = dict.fromkeys(("id", "title", "question", "command", "not_shown"), "A")
    control = Control.model_validate({**text, "needs": ["a"], "decides": {"b/*/c": "*"}})
    good = {"a": 1, "b": [{"c": 2}, {"c": "x"}]}

    def state(document: Any, code: int = 0) -> str:
        return judge(control, Answer(document, code, "", 0))

    assert state(good) == "shown"
    assert {state(d) for d in ({"a": 1}, {"a": 1, "b": []}, {"a": 1, "b": [{"c": ""}]})} == {
        "not all well"
    }
    absent = {state({**good, "a": []}), state(None, 1), state(None, 2), state(good, 3)}
    assert absent == {"cannot be shown here"}
    assert {state(good, 1), state(good, 4), state(None, 5)} == {"not all well"}


def test_the_catalogue_and_the_ten_questions_name_commands_that_exist_and_answer(
    small: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "FOLDER", Path(evidence.__file__).parent / "frameworks")
    controls = read_framework("iso27001").controls
    assert len({control.id for control in controls}) == len(controls) > 20
    for control in controls:
        program, *words = shlex.split(control.command)
        assert program == "falaj" or (program == "make" and control.files), control.id
        if not control.files:
            app.parse_args(words, exit_on_error=False, print_error=False)
    text = (PROJECT_ROOT / "docs" / "how-to" / "answer-an-auditor.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\| (\d+) \| [^|]+\? \| `falaj ([^`]+)` \|$", text, re.M)
    assert [int(number) for number, _ in asked] == [*range(1, 11)]
    assert f"each of {len(controls)} controls" in text
    for _, command in asked:
        capsys.readouterr()
        code = main([*shlex.split(command), "--json"])
        assert code == (1 if command == "verify" else 0)  # of this model no raw file is recorded
        assert json.loads(capsys.readouterr().out) is not None
