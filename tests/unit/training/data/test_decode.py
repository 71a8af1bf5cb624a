import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError
from tasks.training.data.decode import BLOCKS_PER_SHARD, SnapshotFile, deal_blocks
from tasks.training.data.store import RowStore
from tests.support.data.builders import COLUMNS, YEAR, frame, month
from tests.support.training.reading_ranks import write

NUM_SHARDS = 4


def written(folder: Path, rows: pd.DataFrame, row_group_size: int = 100) -> SnapshotFile:
    return write(folder, rows, row_group_size, NUM_SHARDS)


def decoded(
    snapshot: SnapshotFile, window: TimeWindow = YEAR, shards: range = range(NUM_SHARDS)
) -> RowStore:
    """Decoded anew, wherever others are."""
    folder = snapshot.path.parent / f"rows-{uuid.uuid4()}"
    return RowStore(folder, snapshot, window, shards, lambda: None)


def words_of(store: RowStore, shard: int) -> np.ndarray:
    return store.read(shard, np.array([0]), np.array([store.facts[shard].num_rows]))


@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 8))
def test_shards_are_even_however_large_the_row_groups(
    num_groups: int, group_rows: int, num_shards: int
) -> None:
    dealt = deal_blocks([group_rows] * num_groups, num_shards)
    sizes = np.bincount(np.concatenate([g.owners() for g in dealt]), minlength=num_shards)
    num_rows = num_groups * group_rows
    one_block = num_rows / num_shards / BLOCKS_PER_SHARD
    assert sizes.sum() == num_rows
    assert all(set(group.owners()) <= group.shards() for group in dealt)
    assert np.ptp(sizes) <= 2 * one_block + 3 * BLOCKS_PER_SHARD


def test_words_hold_what_every_exported_model_is_given(tmp_path: Path) -> None:
    """Codes and numbers are those of `DatasetSchema.model_inputs`, which serving uses."""
    rows = frame(900)
    rows.loc[3, "carrier"] = ""
    rows.loc[5, "temp"] = np.inf
    snapshot = written(tmp_path, rows)
    codes, numeric = COLUMNS.model_inputs(rows)
    owners = np.concatenate([group.owners() for group in snapshot.groups(YEAR).values()])
    store = decoded(snapshot)
    for shard in range(NUM_SHARDS):
        words, own = words_of(store, shard), owners == shard
        np.testing.assert_array_equal(snapshot.layout.codes(words), codes[own])
        np.testing.assert_array_equal(snapshot.layout.numeric(words), numeric[own])
        np.testing.assert_array_equal(snapshot.layout.labels(words), rows[own]["is_late"])


def test_facts_count_what_lies_in_the_window(tmp_path: Path) -> None:
    rows, window = frame(1500), month(3, 4)
    inside = rows[(rows.event_timestamp >= window.start) & (rows.event_timestamp < window.end)]
    snapshot = written(tmp_path, rows)
    for num_ranks in (1, 2, 3, 4, 6):
        of_ranks = (range(rank, NUM_SHARDS, num_ranks) for rank in range(num_ranks))
        stores = [decoded(snapshot, window, shards) for shards in of_ranks]
        facts = [facts for store in stores for facts in store.facts.values()]
        assert sum(f.num_rows for f in facts) == len(inside)
        assert sum(f.num_rows * f.label_mean for f in facts) == pytest.approx(
            inside["is_late"].sum()
        )
        for name in COLUMNS.categorical:
            counted = sum(
                (f.category_counts[name] for f in facts),
                start=type(facts[0].category_counts[name])(),
            )
            assert counted == inside[name].value_counts().to_dict()
        missing = np.sum([f.num_missing for f in facts], axis=0)
        np.testing.assert_array_equal(missing, inside[list(COLUMNS.numeric)].isna().sum())


@pytest.mark.parametrize("label", [2.0, None, -1.0, float("nan")])
def test_a_label_that_is_neither_0_nor_1_is_refused(tmp_path: Path, label: float | None) -> None:
    rows = frame(300).astype({"is_late": "float64"})
    rows.loc[17, "is_late"] = label
    with pytest.raises(DataContractError, match=r"1 of \d+ rows have a label .*flight_id is 17\."):
        decoded(written(tmp_path, rows))


def test_a_large_row_group_is_decoded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = written(tmp_path, frame(900), row_group_size=900)
    whole = decoded(snapshot)
    monkeypatch.setattr("tasks.training.data.decode.DECODED_ROWS", 64)
    parts = decoded(snapshot)
    for shard in range(NUM_SHARDS):
        np.testing.assert_array_equal(words_of(parts, shard), words_of(whole, shard))
        assert parts.facts[shard].category_counts == whole.facts[shard].category_counts


def test_a_file_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    snapshot = written(tmp_path, frame(900))
    with snapshot.path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(DataContractError, match=r"row group \d of 9 .*the file was cut or changed"):
        decoded(snapshot)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows.drop(columns=["temp", "gust"]), r"lacks column\(s\) temp, gust"),
        (lambda rows: rows.astype({"temp": "str"}), "column 'temp' .* expected a number"),
        (
            lambda rows: rows.assign(event_timestamp=rows.event_timestamp.dt.tz_localize(None)),
            "expected a timestamp with a time zone",
        ),
    ],
)
def test_a_column_that_is_missing_or_of_a_wrong_type_is_named(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], reason: str
) -> None:
    with pytest.raises(DataContractError, match=reason):
        written(tmp_path, change(frame(300)))


def test_categories_that_are_integers_are_read_like_text(tmp_path: Path) -> None:
    rows = frame(300)
    rows["carrier"] = np.arange(300) % 3
    store = decoded(written(tmp_path, rows, row_group_size=50))
    assert set(store.facts[0].category_counts["carrier"]) == {"0", "1", "2"}


@pytest.mark.parametrize("kind", ["int64", "float64", "bool", "Int16"])
def test_numbers_of_any_type_become_float32(tmp_path: Path, kind: str) -> None:
    rows = frame(300)
    rows["temp"] = (np.arange(300) % 2).astype(np.int64)
    rows = rows.astype({"temp": kind})
    if kind == "Int16":
        rows.loc[::7, "temp"] = pd.NA
    snapshot = write(tmp_path, rows, num_shards=1)
    words = words_of(decoded(snapshot, shards=range(1)), 0)
    _, expected = COLUMNS.model_inputs(rows)
    np.testing.assert_array_equal(snapshot.layout.numeric(words), expected)
