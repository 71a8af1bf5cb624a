"""Mistakes that people make with a project of their own: each is named, with place and remedy."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from falaj.onboarding import raw
from falaj.onboarding.checks import check_project
from falaj.onboarding.findings import exit_code
from tests.support.data.shop import Shop
from tests.support.host.processes import run_python

MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
FEW_ROWS = "evaluation: {min_slice_rows: 20, min_slice_positives: 5}\n"
WAIT = "clock: {label_hours: 336}\n"
HEAVY = {"prefect", "feast", "torch", "mlflow", "sklearn", "great_expectations"}
EXIT_CODES = {"configuration error": 2, "data error": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop without a mistake: its slices are small, so small ones are judged, and labels wait."""
    shop = Shop(tmp_path_factory.mktemp("source"))
    with (shop.repo / "use_case.yaml").open("a") as file:
        file.write(FEW_ROWS + WAIT)
    return shop.repo


@pytest.fixture
def repo(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "broken.zip").write_bytes(b"PK")
    return Path(shutil.copytree(source, tmp_path / "shop"))


def make(mistake: dict[str, Any], file: Path) -> None:
    """Change a file of the project as somebody did."""
    file.parent.mkdir(exist_ok=True)
    text = file.read_text() if file.is_file() else ""
    if "whole" in mistake:
        text = mistake["whole"]
    elif "column" in mistake:
        lines = [line.split(",") for line in text.splitlines()]
        place, number = lines[0].index(mistake["column"]), mistake.get("line")
        for cells in lines[number - 1 : number] if number else lines[1:]:
            cells[place] = mistake["put"]
        text = "".join(f"{','.join(cells)}\n" for cells in lines)
    elif "for" in mistake:
        assert mistake["for"] in text
        text = text.replace(mistake["for"], mistake["put"])
    else:
        text += mistake["put"] + "\n"
    file.write_bytes(text.encode("latin-1"))


def test_a_check_imports_no_library_of_the_loop() -> None:
    program = f"import falaj.onboarding.checks, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert run_python("-c", program).stdout.strip() == "[]"


def test_there_are_forty_mistakes_at_least() -> None:
    assert len({mistake["mistake"] for mistake in MISTAKES}) >= 40


def test_a_project_without_a_mistake_has_no_finding(repo: Path) -> None:
    report = check_project(repo)
    assert report.findings == []
    assert [split["name"] for split in report.splits] == ["train", "validation", "test", "current"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda given: given["mistake"].replace(" ", "-"))
def test_a_mistake_is_named_with_its_place_and_a_remedy(
    mistake: dict[str, Any], repo: Path
) -> None:
    make(mistake, repo / mistake["in"])
    found = check_project(repo).findings
    there = [f for f in found if f.place.startswith(mistake["place"]) and mistake["do"] in f.action]
    assert there, "\n".join(line for finding in found for line in finding.lines())
    sort = mistake.get("is", "configuration error")
    assert f"{there[0].kind} {there[0].severity}" == sort
    assert exit_code(there) == EXIT_CODES.get(sort, 0)
    assert not list(repo.parent.glob("shop/.falaj*"))


def test_a_value_that_is_not_in_the_sample_is_told_with_its_query(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "SAMPLE_ROWS", 50)
    file, old = repo / "sql" / "entities.sql", ")::INTEGER AS again"
    bad = ")::INTEGER + CASE WHEN order_id = 17 THEN customer::INTEGER ELSE 0 END AS again"
    make({"for": old, "put": bad}, file)
    report = check_project(repo)
    assert [(f.check, f.file) for f in report.findings] == [("wrong-value", "sql/entities.sql")]
    assert report.splits == []
