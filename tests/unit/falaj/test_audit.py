from __future__ import annotations

from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.features.access.audit import AuditTrail


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
