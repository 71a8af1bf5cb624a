"""The scan: what it lets pass, and that each of its rules has an example to find."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from infra.scan import __main__ as scan
from infra.scan.__main__ import Finding, NotCheckedError, Waiver, judge
from tasks.kernel.settings import PROJECT_ROOT

PICKLE = Finding("unpickling", "tasks/a.py", 3, "runs code")
REASON = "read back only what this process wrote"


def waiver(count: int | None = 1) -> Waiver:
    return Waiver(tool="semgrep", rule="unpickling", path="tasks/*", count=count, reason=REASON)


def test_a_finding_is_open_until_a_waiver_names_its_rule_and_file() -> None:
    assert judge([PICKLE], [waiver()]) == (1, [])
    for other in (PICKLE._replace(rule="shell"), PICKLE._replace(path="flows/a.py")):
        waived, lines = judge([other], [])
        assert (waived, len(lines)) == (0, 1)
        assert len(judge([other], [waiver()])[1]) == 2  # and the waiver covers nothing


def test_a_waiver_that_covers_another_number_is_open() -> None:
    second = PICKLE._replace(line=9)
    assert "covers 2 findings, expected 1" in judge([PICKLE, second], [waiver()])[1][0]
    assert "covers 0 findings" in judge([], [waiver(None)])[1][0]
    assert judge([PICKLE, second], [waiver(None)]) == (2, [])


def test_a_tool_that_could_not_look_is_open_but_for_a_feed_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scan, "FOLDER", tmp_path)
    monkeypatch.setattr(scan, "RESULT", tmp_path / "scan" / "result.json")
    (tmp_path / "waivers.yaml").write_text("[]")
    for code, tool, reason, *words in (
        (0, "advisories", "requests.ConnectionError: osv.dev"),
        (1, "advisories", "requests.ConnectionError: osv.dev", "--advisories"),
        (1, "advisories", "the lock cannot be read"),
        (1, "semgrep", "ConnectionError"),
    ):
        find = Mock(side_effect=NotCheckedError(reason))
        find.__name__ = tool
        monkeypatch.setattr(scan, "TOOLS", (find,))
        assert scan.main(words) == code
        row = json.loads(scan.RESULT.read_text())["tools"][tool]
        assert (row["note"], len(row["open"])) == (f"not checked: {reason}", code)


def test_every_rule_has_an_example_to_find() -> None:
    rules = "".join(file.read_text() for file in (scan.FOLDER / "rules").glob("*.yaml"))
    examples = "".join(f.read_text() for f in (PROJECT_ROOT / "tests/support/scan").iterdir())
    known = set(re.findall(r"- id: (\S+)", rules))
    assert len(known) > 12
    assert known == set(re.findall(r"# ruleid: (\S+)", examples))
