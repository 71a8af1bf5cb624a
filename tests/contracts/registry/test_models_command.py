"""What the command line shows of a real registry, and how a damaged version is told."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.registry.config import ApprovalConfig, PromotionConfig
from tests.support.registry.builders import CONFIG, World, comparison
from tests.support.state import told

NAME = CONFIG.model_name
ASKING = PromotionConfig(approval=ApprovalConfig(enabled=True, timeout_h=24))


@pytest.fixture
def filled(world: World) -> World:
    """A champion, and a candidate about which a person was asked."""
    world.promoted(0)
    world.promoted(1, (comparison("champion:1", 0.004),), ASKING, datetime.now(UTC))
    return world


def test_versions_are_listed_with_alias_quality_and_outcome(
    filled: World, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, first = told(capsys, "models", "list")
    assert (newest["version"], newest["aliases"]) == (2, ["candidate"])
    assert newest["approval"]["state"] == "waiting"
    assert (first["version"], first["aliases"]) == (1, ["champion"])
    assert (first["metric"], first["quality"]["value"]) == ("AUC", 0.75)
    assert main(["models", "list"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "champion" in said[1]
    assert "AUC 0.7500 [" in said[1]


def test_the_champion_is_shown_and_told_apart_from_a_damaged_version(
    filled: World, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = told(capsys, "models", "show")
    assert (shown["version"], shown["damage"]) == (1, [])
    assert [variant["name"] for variant in shown["variants"]] == ["onnx-fp32", "openvino-int8"]
    (filled.version(1).folder / "program.pt2").write_bytes(b"changed")
    assert "program.pt2" in told(capsys, "models", "show")["damage"][0]
    assert main(["models", "show", NAME, "9"]) == 1


def test_the_status_tells_of_champion_candidate_and_open_question(
    filled: World, capsys: pytest.CaptureFixture[str]
) -> None:
    status = told(capsys, "status")["model"]
    assert (status["champion"]["version"], status["candidate"]["version"]) == (1, 2)
    assert (status["waits_for_approval"], status["drift"], status["release"]) == ([2], None, None)
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "Champion  version 1, AUC 0.7500 [" in said
    assert f"falaj models approve {NAME} 2 --approver NAME" in said


def test_without_doing_it_an_approval_and_a_withdrawal_show_what_they_would_do(
    filled: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(filled)
    judged = told(capsys, "models", "approve", NAME, "2", "--approver", "Ana", "--dry-run")
    assert not judged["promoted"]
    assert {gate["name"] for gate in judged["gates"] if not gate["passed"]} == set()
    words = ["models", "withdraw", NAME, "1", "--reason", "leaks", "--approver", "Ana"]
    assert told(capsys, *words, "--dry-run")["version"] == 1
    assert filled.champion == 1
    assert contents(filled) == before


def contents(world: World) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in world.home.rglob("*.json*") if file.is_file()}
