"""Suite files: what is refused at the door, and with which words."""

from pathlib import Path

import pandas as pd
import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.expectations import compile_suite
from tasks.validation.runner import validate_table
from tasks.validation.suites import FOLDER, read_suite
from tests.support.data.tables import REPO, WEEK, opened, real_table

GOOD = """
suite: people
subject: one person
columns:
  text: [name]
  number: [age, height]
derived:
  is_grown: age >= 18
aggregates:
  ages: SELECT avg(age) AS mean_age FROM subject
expectations:
  - type: expect_column_values_to_be_between
    kwargs: {column: age, min_value: 0}
    says: an age is positive
"""


def write(folder: Path, text: str, name: str = "people") -> Path:
    (folder / "expectations").mkdir(exist_ok=True)
    (folder / "expectations" / f"{name}.yaml").write_text(text)
    return folder


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text(GOOD)

    with pytest.raises(ConfigurationError, match="no suite name"):
        read_suite(write(tmp_path, GOOD), "../secret")


@pytest.mark.parametrize("content", [b"suite: [people", b"\xff\xfe\x00", b"", b"- one"])
def test_a_file_that_holds_no_suite_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, GOOD)
    (tmp_path / "expectations" / "people.yaml").write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"suite file expectations/people\.yaml"):
        read_suite(tmp_path, "people")


SAYS = "says: an age is positive"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("suite: people", "suite: persons", "calls itself 'persons'"),
        (SAYS, f"{SAYS}\n    severe: yes", "expectation 1: severe"),
        ("{column: age,", "{column: agee,", "names column(s) agee, which subject does not have"),
        ("kwargs: {column: age,", 'for_columns: ["weight_*"]\n    kwargs: {', "weight_*"),
        ("kwargs: {column", "for_columns: [age]\n    kwargs: {column", "use one of them"),
        (SAYS, f"{SAYS}\n    table: sums", "table 'sums', which is not among subject, ages"),
        ("is_grown:", "age:", "age are declared twice"),
        ("  text: [name]", "  text: [name]\n  text: [nickname]", "written twice"),
        ("to_be_between", "to_be_betwixt", "knows no expectation"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in GOOD
    with pytest.raises(ConfigurationError) as caught:
        read_suite(write(tmp_path, GOOD.replace(old, new)), "people")
    assert words in str(caught.value)


# The suites of the flights use case

SUITES = sorted(path.stem for path in (REPO / FOLDER).glob("*.yaml"))
DTYPES = {
    "text": "string",
    "integer": "int64",
    "number": "float32",
    "boolean": "bool",
    "timestamp": "datetime64[us, UTC]",
}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_file_parses_and_its_sql_and_expectations_are_sound(
    tmp_path: Path, name: str
) -> None:
    checked = read_suite(REPO, name)
    columns = {name: DTYPES[kind] for kind, names in checked.columns.items() for name in names}
    empty = pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in columns.items()})

    with opened(empty, checked, tmp_path) as subject:
        checks = compile_suite(checked, subject.derive())

    assert len(checks) >= len(checked.expectations)


@pytest.mark.parametrize("table", ["flights", "weather", "planes", "airports"])
def test_clean_rows_pass(store: ArtifactStore, table: str) -> None:
    checked = read_suite(REPO, f"raw_{table}")
    result = validate_table(real_table(store, table), checked, WEEK, store, "Nothing")

    assert result.warnings == ()
    assert result.num_expectations >= len(checked.expectations) - 2
