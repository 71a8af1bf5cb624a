"""Mistakes that people make with a project of their own: `check` names each, where, and a remedy."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from falaj.onboarding.checks import check_project
from falaj.onboarding.findings import Finding, exit_code
from tests.support.data.shop import Shop

USE_CASE, ORDERS, HABITS, FRAME = (
    "use_case.yaml",
    "raw/orders.csv",
    "sql/habits.sql",
    "sql/entities.sql",
)
FEW_ROWS = "evaluation: {min_slice_rows: 20, min_slice_positives: 5}\n"
Edit = Callable[[Path], None]


def replaced(file: str, old: str, new: str) -> Edit:
    """Change a text of a file; it must be there."""

    def edit(repo: Path) -> None:
        text = (repo / file).read_text()
        assert old in text
        (repo / file).write_text(text.replace(old, new, 1))

    return edit


def added(file: str, text: str) -> Edit:
    """Write a text behind a file's last line."""
    return lambda repo: (repo / file).open("a").write(text) and None


def cell(line: int, column: str, value: str) -> Edit:
    """Write another value into one line of the orders; line 1 is that of the names."""

    def edit(repo: Path) -> None:
        lines = (repo / ORDERS).read_text().splitlines()
        cells, names = lines[line - 1].split(","), lines[0].split(",")
        cells[names.index(column)] = value
        lines[line - 1] = ",".join(cells)
        (repo / ORDERS).write_text("\n".join(lines) + "\n")

    return edit


def all_cells(column: str, change: Callable[[str], str]) -> Edit:
    """Change every value of a column of the orders."""

    def edit(repo: Path) -> None:
        lines = [line.split(",") for line in (repo / ORDERS).read_text().splitlines()]
        place = lines[0].index(column)
        for cells in lines[1:]:
            cells[place] = change(cells[place])
        (repo / ORDERS).write_text("\n".join(",".join(cells) for cells in lines) + "\n")

    return edit


def all_lines(change: Callable[[str], str]) -> Edit:
    """Change the whole text of the orders."""

    def edit(repo: Path) -> None:
        text = change((repo / ORDERS).read_text())
        (repo / ORDERS).write_bytes(text.encode("latin-1"))

    return edit


def written(file: str, content: bytes) -> Edit:
    """Write a file anew."""
    return lambda repo: (repo / file).write_bytes(content) and None


@dataclass(frozen=True)
class Mistake:
    """What somebody did, and what must be said of it."""

    name: str
    edit: Edit
    place: str
    action: str
    kind: str = "configuration"
    severity: str = "error"


MISTAKES = [
    # What use_case.yaml says.
    Mistake("a misspelt setting", replaced(USE_CASE, "row_id:", "row_idd:"), "use_case.yaml:25", "write row_id"),
    Mistake("a misspelt setting of a stage", added(USE_CASE, "training: {max_epoch: 3}\n"), "use_case.yaml:41", "max_epochs"),
    Mistake("a tab", replaced(USE_CASE, "  training_set:", "\ttraining_set:"), "use_case.yaml:21", "spaces"),
    Mistake("a missing label", replaced(USE_CASE, "    label: again\n", ""), "use_case.yaml:21", "label: ..."),
    Mistake("an unknown type", replaced(USE_CASE, "amount: DOUBLE", "amount: DOUBEL"), "use_case.yaml:12", "did you mean DOUBLE"),
    Mistake("a key that is no column", replaced(USE_CASE, "key: [order_id]", "key: [order]"), "use_case.yaml:6", "did you mean order_id"),
    Mistake("a reversed window", replaced(USE_CASE, "train: {start: 2024-01-01", "train: {start: 2024-06-01"), "use_case.yaml:33", "mend"),
    Mistake("splits out of order", replaced(USE_CASE, "validation: {start: 2024-05-01", "validation: {start: 2024-04-01"), "use_case.yaml:32", "mend"),
    Mistake("a window without a zone", replaced(USE_CASE, "end: 2024-07-01T00:00:00Z}\nsplits", "end: 2024-07-01T00:00:00}\nsplits"), "use_case.yaml:31", "+00:00"),
    Mistake("a split outside the window", replaced(USE_CASE, "window: {start: 2024-01-01", "window: {start: 2024-02-01"), "use_case.yaml:33", "widen"),
    Mistake("a floor above the ceiling", added(USE_CASE, "promotion: {min_auc: 0.97}\n"), "use_case.yaml:41", "lower the floor"),
    Mistake("an entry twice", replaced(USE_CASE, "question:", "name: shop\nquestion:"), "use_case.yaml:3", "keep one"),
    Mistake("a name with a space", replaced(USE_CASE, "name: shop", "name: My Shop"), "use_case.yaml:2", "mend name"),
    Mistake("a negative lookback", replaced(USE_CASE, "lookback_hours: 672", "lookback_hours: -1"), "use_case.yaml:20", "mend"),
    Mistake("a query file that is not there", replaced(USE_CASE, "sql/habits.sql", "sql/habit.sql"), "use_case.yaml:20", "did you mean sql/habits.sql"),
    Mistake("definitions that are no Python", added("definitions.py", "def (\n"), "definitions.py:33", "mend"),
    Mistake("an unknown expectation", replaced("expectations/raw_orders.yaml", "expect_", "expects_"), "raw_orders.yaml", ""),
    # Raw files.
    Mistake("a file that is not there", replaced(USE_CASE, "raw/orders.csv", "raw/order.csv"), "use_case.yaml:7", "did you mean orders.csv"),
    Mistake("an empty file", written(ORDERS, b""), ORDERS, "send the file", "data"),
    Mistake("a file without the line of names", all_lines(lambda text: text.partition("\n")[2]), f"{ORDERS}:1, column", "", "data"),
    Mistake("another name of a column", replaced(ORDERS, "amount", "Amount (EUR)"), f"{ORDERS}:1, column amount", "rename: {Amount (EUR): amount}", "data"),
    Mistake("two columns of one name", replaced(ORDERS, "items", "Amount"), f"{ORDERS}:1, column items", "", "data"),
    Mistake("latin-1", all_lines(lambda text: text.replace("c07", "J\xf6rg", 1)), f"{ORDERS}:", "UTF-8", "data"),
    Mistake("a line with a value too many", cell(17, "amount", "12,50"), f"{ORDERS}:17", "mend that line", "data"),
    Mistake("an odd delimiter", all_lines(lambda text: text.replace(",", "^")), f"{ORDERS}:1, column order_id", "separate the columns", "data"),
    Mistake("a decimal comma", cell(17, "amount", "") , f"{ORDERS}:17", "", "data"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shop = Shop(tmp_path_factory.mktemp("source"))
    added(USE_CASE, FEW_ROWS)(shop.repo)
    return shop.repo


@pytest.fixture
def repo(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "shop"))


def findings(repo: Path) -> Iterator[Finding]:
    yield from check_project(repo).findings


def test_a_project_without_a_mistake_has_no_finding(repo: Path) -> None:
    assert list(findings(repo)) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_mistake_is_named_with_its_place_and_a_remedy(mistake: Mistake, repo: Path) -> None:
    mistake.edit(repo)
    found = list(findings(repo))
    if 1:
        for f in found: print("\n".join(f.lines()))
    matching = [f for f in found if mistake.place in f.place]
    assert matching
    assert any(mistake.action in f.action for f in matching)
    assert {(f.kind, f.severity) for f in matching} == {(mistake.kind, mistake.severity)}
    assert exit_code(found) == (0 if mistake.severity == "warning" else 2 if mistake.kind == "configuration" else 4)
