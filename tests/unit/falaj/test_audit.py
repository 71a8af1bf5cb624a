from __future__ import annotations

from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.features.access.audit import AuditTrail


def test_a_state_folder_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "mistyped"
    assert main(["--home", str(home), "audit"]) == 2
    assert f"there is no state folder {home}" in capsys.readouterr().err
    assert not home.exists()


def test_a_trail_that_was_removed_is_refused_where_the_store_was_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--home", str(tmp_path), "audit"]
    assert main(arguments) == 0
    assert "0 lines" in capsys.readouterr().out
    (tmp_path / "feast").mkdir()
    (tmp_path / "feast" / "applied.json").write_text("{}")
    assert main(arguments) == 2
    assert f"the audit trail in {tmp_path / 'audit'} is gone" in capsys.readouterr().err


def test_a_trail_without_its_newest_line_is_shown_and_refused_after_later_acts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trail = AuditTrail(tmp_path / "audit")
    for view in ("one", "two"):
        trail.append("push", outcome="ok", subject={"view": view})
    (file,) = trail.folder.glob("features-*.jsonl")
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    trail.append("push", outcome="ok", subject={"view": "three"})
    assert main(["--home", str(tmp_path), "audit"]) == 2
    said = capsys.readouterr()
    assert ": one" in said.out
    assert ": three" in said.out
    assert "line 2 does not follow the line before it" in said.err


def test_the_trail_of_another_use_case_says_where_answers_to_promotions_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo, home = tmp_path / "repo", tmp_path / "home"
    repo.mkdir()
    (repo / "use_case.yaml").write_text("name: other\n")
    own = AuditTrail(home / "use_cases" / "other" / "audit")
    own.append("push", outcome="ok", subject={"view": "trend"})
    arguments = ["--home", str(home), "--repo", str(repo), "audit"]
    assert main(arguments) == 0
    assert "Answers" not in capsys.readouterr().out
    AuditTrail(home / "audit").append("answer-promotion", outcome="approve", subject={})
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert ": trend" in said
    assert f"of every use case, are in {home / 'audit'}" in said
