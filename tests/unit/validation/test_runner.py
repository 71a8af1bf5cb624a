"""Gates: what they return, what they keep, what they refuse and how they say it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.data import DataSplits, ValidationResult
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.outcome import SuiteOutcome, read_outcome
from tasks.validation.runner import validate_snapshot, validate_table, validate_tables
from tasks.validation.suites import Suite
from tests.support.data import builders
from tests.support.data.builders import month
from tests.support.data.tables import SNAPSHOT_SUITE, WEEK, between, people, store_table, suite


def validate(store: ArtifactStore, frame: pd.DataFrame, checked: Suite) -> ValidationResult:
    return validate_table(store_table(store, frame), checked, WEEK, store, "Nothing was done")


def refusal(store: ArtifactStore, frame: pd.DataFrame, checked: Suite) -> str:
    with pytest.raises(DataContractError) as caught:
        validate(store, frame, checked)
    return str(caught.value)


def test_a_finished_validation_is_not_repeated(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = validate(store, people(), suite())
    monkeypatch.setattr("tasks.validation.runner.run_checks", None)

    assert validate(store, people(), suite()) == first


def test_a_failure_says_what_how_often_for_example_and_where_the_result_is(
    store: ArtifactStore,
) -> None:
    message = refusal(store, people(), suite(between("age", 0, 55), between("age", 0, 120)))

    assert message.startswith(
        "suite 'people': 1 of 2 expectations failed on 40 rows of people "
        "(2013-03-04T05:00Z to 2013-03-11T05:00Z): age has 4 values outside 0 to 55, for example "
        "56, 57, 58 (age lies between 0 and 55). Nothing was done. Full result: "
    )
    kept = read_outcome(Path(message.split("Full result: ")[1]))
    assert not kept.passed
    assert len(kept.results) == 2
    assert [check.status for check in kept.checks] == ["failed", "passed"]


def test_a_failed_warning_is_told_and_stops_nothing(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    result = validate(store, people(), suite(between("age", 0, 30, severity="warning")))

    assert [check.status for check in read_outcome(store.path(result.result)).checks] == ["warned"]
    assert "age has 29 values outside 0 to 30" in caplog.text


@pytest.mark.parametrize(
    ("frame", "checked", "words"),
    [
        (people(), suite(between("age", 0, 120, min_rows=1000)), "40 rows are too few"),
        (
            people(),
            suite(between("number", 0, 9), derived={"number": "name::INT"}),
            "number of people cannot be computed, a value does not fit",
        ),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused_and_the_result_kept(
    store: ArtifactStore, frame: pd.DataFrame, checked: Suite, words: str
) -> None:
    message = refusal(store, frame, checked)

    assert message.startswith("suite 'people' cannot judge")
    assert words in message
    kept = read_outcome(Path(message.split("Full result: ")[1]))
    assert kept.table_faults
    assert kept.results == ()


def test_every_table_is_judged_and_all_refusals_are_told(store: ArtifactStore) -> None:
    good, old, few = (
        store_table(store, frame, name)
        for name, frame in (
            ("good", people()),
            ("old", people().assign(age=300.0)),
            ("few", people().drop(columns=["town"])),
        )
    )
    seen: list[SuiteOutcome] = []
    suites = {name: suite() for name in ("good", "old", "few")}

    with pytest.raises(DataContractError) as caught:
        validate_tables((good, old, few), suites, WEEK, store, "Nothing was changed", seen.append)

    assert "age has 40 values outside 0 to 120" in str(caught.value)
    assert "column(s) town are missing" in str(caught.value)
    assert str(caught.value).count("Nothing was changed") == 2
    judged = sorted((outcome.subject, outcome.passed) for outcome in seen)  # two side by side
    assert judged == [("few", False), ("good", True), ("old", False)]


def test_a_table_without_a_suite_is_refused_before_any_is_judged(store: ArtifactStore) -> None:
    with pytest.raises(ConfigurationError, match=r"table\(s\) people have no expectation suite"):
        validate_tables((store_table(store, people()),), {}, WEEK, store, "Nothing was changed")


def test_after_a_wrong_suite_no_further_table_is_begun(store: ArtifactStore) -> None:
    tables = [store_table(store, people(), f"table_{n}") for n in range(12)]
    suites = {table.name: suite() for table in tables}
    suites["table_0"] = suite(between("number", 0, 9), derived={"number": "no_such(name)"})
    seen: list[SuiteOutcome] = []

    with pytest.raises(ConfigurationError, match="the SQL is wrong"):
        validate_tables(tables, suites, WEEK, store, "Nothing was changed", seen.append)

    assert len(seen) < len(tables) - 1


def test_a_label_among_the_features_is_refused(store: ArtifactStore) -> None:
    snapshot = builders.dataset(store).snapshot
    columns = snapshot.columns
    leaky = columns.model_copy(update={"numeric": (*columns.numeric, columns.label)})

    with pytest.raises(DataContractError, match=r"is_late have more than one role.*was trained"):
        validate_snapshot(snapshot.model_copy(update={"columns": leaky}), SNAPSHOT_SUITE, store)


def refusal_to_train(
    store: ArtifactStore, rows: pd.DataFrame, splits: DataSplits | None = None
) -> str:
    snapshot = builders.dataset(store, rows).snapshot
    assert validate_snapshot(snapshot, SNAPSHOT_SUITE, store).snapshot == snapshot
    with pytest.raises(DataContractError) as refused:
        validate_snapshot(snapshot, SNAPSHOT_SUITE, store, splits=splits or builders.splits())
    return str(refused.value)


@pytest.mark.parametrize(
    ("column", "nothing", "in_months", "words"),
    [
        ("gust", np.nan, (1, 6), "gust have no known value in any of the"),
        ("dest", "", (1, 6), "dest have no known value in any of the"),
        ("temp", None, (1, 6), "temp have no known value in any of the"),
        ("is_late", 0, (7, 8), "label is_late is 0 in all"),
    ],
)
def test_a_window_that_nothing_can_be_learned_from_is_refused(
    store: ArtifactStore, column: str, nothing: object, in_months: tuple[int, int], words: str
) -> None:
    rows = builders.frame()
    rows.loc[rows["event_timestamp"].dt.month.between(*in_months), column] = nothing
    assert words in refusal_to_train(store, rows)


def test_a_window_without_rows(store: ArtifactStore) -> None:
    rows = builders.frame()
    splits = DataSplits(train=month(1, 6), validation=month(7), test=month(8))
    kept = rows[rows["event_timestamp"].dt.month < 8]
    assert "move splits.test" in refusal_to_train(store, kept, splits)
