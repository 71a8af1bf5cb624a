"""The table under a suite: faults of the table itself, derived columns, frames."""

from pathlib import Path

import pandas as pd
import pytest

from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.validation.subject import open_subject
from tasks.validation.suites import Suite
from tests.support.data.tables import WEEK, opened, people, suite

WHOLE = suite(columns={"text": ["name", "town"], "integer": ["age"], "timestamp": ["born"]})
PLAIN = people()["born"].dt.tz_localize(None).astype("datetime64[us]")


@pytest.mark.parametrize(
    ("frame", "checked", "words"),
    [
        (people().assign(age="old"), suite(), ["age is VARCHAR, expected numbers; it holds 'old'"]),
        (people(), WHOLE, ["age is DOUBLE, expected whole numbers"]),
        (people().assign(born=PLAIN), suite(), ["born is TIMESTAMP, expected moments with a time"]),
        (people()[:0], suite(), ["people has no rows"]),
        (
            people().drop(columns=["town"]).assign(born="today", salary=1),
            suite(),
            ["town are missing", "salary are not", "born is VARCHAR"],
        ),
    ],
)
def test_each_fault_of_the_table_itself_is_named(
    tmp_path: Path, frame: pd.DataFrame, checked: Suite, words: list[str]
) -> None:
    with opened(frame, checked, tmp_path) as subject:
        seen = subject.table_faults()

    assert len(seen) == len(words)
    for fault, word in zip(seen, words, strict=True):
        assert word in fault


def test_a_folder_is_one_table_and_its_folder_names_add_no_column(tmp_path: Path) -> None:
    for month in (1, 2):
        (tmp_path / f"month={month}").mkdir()
        people().to_parquet(tmp_path / f"month={month}" / "rows.parquet", index=False)

    with open_subject(tmp_path, "people", suite(), WEEK) as subject:
        assert subject.num_rows == 80
        assert subject.table_faults() == []


def test_files_of_one_folder_that_differ_are_named_with_the_column(tmp_path: Path) -> None:
    people().to_parquet(tmp_path / "a.parquet", index=False)
    people().astype({"age": str}).to_parquet(tmp_path / "b.parquet", index=False)

    with (
        pytest.raises(
            DataContractError, match=r"a\.parquet and b\.parquet differ in their columns"
        ),
        open_subject(tmp_path, "people", suite(), WEEK),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"derived": {"months": "agee * 12"}}, "derived column 'months'"),
        ({"aggregates": {"towns": "SELECT nonsense FROM subject"}}, "aggregate 'towns'"),
    ],
)
def test_wrong_sql_names_file_and_entry(
    tmp_path: Path, changes: dict[str, object], place: str
) -> None:
    with (
        opened(people(), suite(**changes), tmp_path) as subject,
        pytest.raises(ConfigurationError, match=rf"expectations/people\.yaml, {place}: the SQL"),
    ):
        subject.derive()


def test_names_with_quotes_cannot_break_out_of_the_sql(tmp_path: Path) -> None:
    odd = "a\"ge'; DROP TABLE subject"
    folder = tmp_path / "it's"
    folder.mkdir()
    checked = suite(
        columns={"text": ["name", "town"], "number": [odd], "timestamp": ["born"]},
        expectations=[{"type": "expect_column_to_exist", "kwargs": {"column": odd}, "says": "x"}],
    )

    with opened(people().rename(columns={"age": odd}), checked, folder) as subject:
        assert subject.table_faults() == []
        subject.derive()
        assert len(subject.frame("subject", [odd])) == 40
