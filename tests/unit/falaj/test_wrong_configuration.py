"""A wrong feature repository is refused at once: no server is started and nothing is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from falaj import __main__ as command
from tasks.kernel.settings import PROJECT_ROOT


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("FALAJ_HOME", "FALAJ_FEATURE_REPO"):
        monkeypatch.setenv(name, str(tmp_path))  # the command sets them; given back afterwards
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    source = PROJECT_ROOT / "feature_repo" / "flights"
    ignored = shutil.ignore_patterns("__pycache__", "baseline")
    return Path(shutil.copytree(source, tmp_path / "repo", ignore=ignored))


def refused(repo: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says of a repository that it refuses; nothing may be left of it."""
    home = repo.parent / "home"
    assert command.main(["--home", str(home), "--repo", str(repo), *words]) == 2
    assert not home.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["features", "refresh", "2013-01-01T05:00Z", "2013-01-02T05:00Z"],
        ["train"],
        ["retry"],
    ],
)
def test_a_wrong_entry(repo: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    file = repo / "use_case.yaml"
    file.write_text(file.read_text().replace("max_epochs: 12", "max_epoch: 12"))
    assert "training.max_epoch" in refused(repo, capsys, *words)


def test_an_entry_written_twice_of_which_the_first_would_be_lost(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = repo / "use_case.yaml"
    file.write_text(file.read_text() + "promotion: {min_auc: 0.5}\n")
    assert "promotion is written twice" in refused(repo, capsys, "run")


@pytest.mark.parametrize("name", ["use_case.yaml", "sql/weather.sql"])
def test_a_file_that_is_not_utf_8(
    repo: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = repo / name
    file.write_bytes(b"# Z\xfcrich\n" + file.read_bytes())
    sentence = refused(repo, capsys, "run")
    assert name in sentence
    assert "UTF-8" in sentence


def test_a_query_that_is_not_there(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "sql" / "weather.sql").unlink()
    assert "sql/weather.sql" in refused(repo, capsys, "run")


def test_definitions_that_are_no_python(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = repo / "definitions.py"
    file.write_text("import (\n" + file.read_text())
    assert "definitions.py, line 1: " in refused(repo, capsys, "run")


def test_definitions_with_a_null_byte(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "definitions.py").write_text('x = "\0"\n')
    assert "definitions.py: source code string cannot contain" in refused(repo, capsys, "run")


@pytest.mark.parametrize(("content", "held"), [("", "nothing"), ("- name", "a list")])
def test_a_use_case_without_names(
    repo: Path, capsys: pytest.CaptureFixture[str], content: str, held: str
) -> None:
    (repo / "use_case.yaml").write_text(content)
    assert f"use_case.yaml holds {held}" in refused(repo, capsys, "run")


def test_an_expectation_that_nobody_knows(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = repo / "expectations" / "feature_weather.yaml"
    file.write_text(file.read_text().replace("_to_be_between", "_to_be_nice", 1))
    assert "no expectation 'expect_column_values_to_be_nice'" in refused(repo, capsys, "run")


def test_a_wrong_suite(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = repo / "expectations" / "feature_weather.yaml"
    file.write_text(file.read_text().replace("units:", "unit:"))
    assert "feature_weather.yaml" in refused(repo, capsys, "run")
