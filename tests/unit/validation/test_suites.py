"""Suite files: what is refused at the door, and with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import content_key
from tasks.validation.suites import read_suite, read_suites
from tests.support.data.tables import suite

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


def refusal(folder: Path, old: str, new: str) -> str:
    assert old in GOOD
    with pytest.raises(ConfigurationError) as caught:
        read_suite(write(folder, GOOD.replace(old, new)), "people")
    return str(caught.value)


def test_a_good_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    people = read_suite(write(tmp_path, GOOD), "people")

    assert people.kind_of("age") == "number"
    assert people.kind_of("is_grown") is None
    assert people.expectations[0].severity == "critical"
    assert people.other_columns == "refuse"


def test_suites_are_read_by_table(tmp_path: Path) -> None:
    repo = write(write(tmp_path, GOOD), GOOD.replace("suite: people", "suite: others"), "others")

    read = read_suites(repo, {"a": "people", "b": "others"})

    assert {table: suite.suite for table, suite in read.items()} == {"a": "people", "b": "others"}


def test_a_missing_file_is_named_with_those_that_exist(tmp_path: Path) -> None:
    repo = write(tmp_path, GOOD)

    with pytest.raises(
        ConfigurationError, match=r"expectations/persons\.yaml.*has the suites people"
    ):
        read_suite(repo, "persons")


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text(GOOD)

    with pytest.raises(ConfigurationError, match="no suite name"):
        read_suite(write(tmp_path, GOOD), "../secret")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"suite file expectations/people\.yaml is no YAML"
    ):
        read_suite(write(tmp_path, "suite: [people"), "people")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    (tmp_path / "expectations" / "people.yaml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigurationError, match="is no YAML"):
        read_suite(tmp_path, "people")


@pytest.mark.parametrize("text", ["", "- one", "just words"])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"suite file expectations/people\.yaml"):
        read_suite(write(tmp_path, text), "people")


def test_a_file_that_calls_itself_otherwise_is_refused(tmp_path: Path) -> None:
    assert "calls itself 'persons'" in refusal(tmp_path, "suite: people", "suite: persons")


def test_an_unknown_field_names_its_expectation(tmp_path: Path) -> None:
    message = refusal(tmp_path, "says: an", "severe: yes\n    says: an")

    assert "expectation 1 (expect_column_values_to_be_between): severe" in message


def test_a_missing_sentence_names_its_expectation(tmp_path: Path) -> None:
    message = refusal(tmp_path, "    says: an age is positive\n", "")

    assert "expectation 1 (expect_column_values_to_be_between): says: Field required" in message


def test_an_unknown_column_is_named_with_the_known_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, "{column: age,", "{column: agee,")

    assert "expectation 1" in message
    assert "names column(s) agee, which subject does not have; it has age, height" in message


def test_a_pattern_without_a_match_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, "kwargs: {column: age,", 'for_columns: ["weight_*"]\n    kwargs: {')

    assert "weight_*" in message


def test_columns_named_in_two_ways_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "kwargs: {column", "for_columns: [age]\n    kwargs: {column")

    assert "use one of them" in message


def test_a_shown_column_must_exist(tmp_path: Path) -> None:
    assert "nickname" in refusal(tmp_path, "says: an", "shows: [nickname]\n    says: an")


def test_an_unknown_table_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, "says: an", "table: sums\n    says: an")

    assert "table 'sums', which is not among subject, ages" in message


def test_a_column_declared_twice_is_refused(tmp_path: Path) -> None:
    assert "age are declared twice" in refusal(tmp_path, "is_grown:", "age:")


def test_an_aggregate_cannot_hide_the_table(tmp_path: Path) -> None:
    assert "'subject'" in refusal(tmp_path, "  ages:", "  subject:")


def test_a_name_written_twice_is_refused_instead_of_lost(tmp_path: Path) -> None:
    message = refusal(tmp_path, "  text: [name]", "  text: [name]\n  text: [nickname]")

    assert "written twice" in message


def test_an_empty_list_of_expectations_is_refused(tmp_path: Path) -> None:
    loaded = yaml.safe_load(GOOD) | {"expectations": []}

    with pytest.raises(ConfigurationError, match="expectations"):
        read_suite(write(tmp_path, yaml.safe_dump(loaded)), "people")


def test_the_content_of_a_suite_is_its_cache_key() -> None:
    assert content_key(suite()) == content_key(suite())
    assert content_key(suite()) != content_key(suite(other_columns="ignore"))


def test_reading_suites_loads_neither_great_expectations_nor_prefect() -> None:
    program = (
        "import sys; sys.modules['great_expectations'] = sys.modules['prefect'] = None; "
        "import tasks.validation.suites"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
