"""What the journal says of commands: that they begin, how they end, and what was refused."""

from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.governance import signing
from tasks.governance.journal import Journal


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    made = Journal(tmp_path / "audit")
    made.append("push", outcome="ok")
    return made


def said(journal: Journal) -> list[tuple[str, str]]:
    lines = (line.content for line in journal.lines() if line.content["action"] == "command")
    return [(line["subject"]["command"], line["outcome"]) for line in lines]


def test_a_command_that_changes_something_is_there_with_its_subject_and_no_secret(
    journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "create", "--subject", "shop", "--role", "infer:m"]) == 0
    key = capsys.readouterr().out.strip()
    assert said(journal) == [("keys create", "begun"), ("keys create", "ok")]
    *_, end = journal.lines()
    assert end.content["subject"]["key"] == key.split("_")[1]
    assert key.split("_", 2)[2].encode() not in b"".join(line.text for line in journal.lines())


def test_refusals_are_there_and_what_only_reads_or_would_do_is_not(journal: Journal) -> None:
    for line in ("keys list", "audit verify", "audit show", "whoami"):
        assert main(line.split()) == 0
    assert said(journal) == []
    assert main(["keys", "revoke", "nobody", "--dry-run"]) == 2
    assert main(["keys", "revoke", "nobody"]) == 2
    refused = ("keys revoke", "refused: ConfigurationError F200")
    assert said(journal) == [refused, ("keys revoke", "begun"), refused]


def test_each_kind_of_line_is_shown(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    signing.sign(journal.folder.parent, "models/m/1", {"model.json": "0" * 64})
    assert main(["audit", "show"]) == 0
    shown = capsys.readouterr().out
    assert "models/m/1" in shown
    assert "is no line of a journal" not in shown


def test_a_journal_that_went_on_elsewhere_refuses_the_command_before_it_does_anything(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "elsewhere" / "heads"
    monkeypatch.setenv("FALAJ_AUDIT", heads.parent.as_uri())
    journal.append("push", outcome="ok")
    (newest,) = heads.rglob("00000000*")
    newest.with_name(f"{2:012d}").write_text("{}")
    monkeypatch.setattr("tasks.governance.journal._next_ships_s", {})
    assert main(["keys", "create", "--subject", "shop", "--role", "infer:m"]) == 1
    assert not (tmp_path / "serving").exists()
    assert main(["audit", "begin", "restored", "--yes"]) == 0
    assert main(["keys", "create", "--subject", "shop", "--role", "infer:m"]) == 0
