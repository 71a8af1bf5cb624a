"""A wrong feature repository is refused at once: no server is started and nothing is kept."""

import shutil
from pathlib import Path

import pytest

from falaj import __main__ as command
from tasks.kernel.settings import PROJECT_ROOT


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_a_seed_that_no_generator_takes(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "seed: Input should" in refused(repo, capsys, "replay", "--seed", "9999999999")


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("use_case.yaml", "", "- name\n", "use_case.yaml"),
        ("use_case.yaml", None, "", "use_case.yaml holds nothing"),
        ("use_case.yaml", "\nquestion:", "\nname: x\nquestion:", "name is written twice"),
        ("sql/weather.sql", None, None, "sql/weather.sql"),
        ("use_case.yaml", None, "# Z\xfcrich", "UTF-8"),
        ("sql/weather.sql", None, "# Z\xfcrich", "UTF-8"),
        ("definitions.py", None, "import (\n", "definitions.py, line 1: "),
        ("definitions.py", None, 'x = "\0"\n', "definitions.py: source code string"),
        ("expectations/feature_weather.yaml", "_to_be_between", "_to_be_nice", "_to_be_nice"),
        ("expectations/feature_weather.yaml", "units:", "unit:", "feature_weather.yaml"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong_in_it(
    repo: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    old: str | None,
    new: str | None,
    sentence: str,
) -> None:
    """With a part of its text replaced, or all of it, or removed."""
    file = repo / name
    if new is None:
        file.unlink()
    else:
        text = new if old is None else file.read_text().replace(old, new, 1)
        file.write_bytes(text.encode("latin-1"))
    assert sentence in refused(repo, capsys, "run")
