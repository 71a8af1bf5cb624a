from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import DatasetSchema, TimeWindow
from tasks.errors import DataContractError
from tasks.training.data.shards import (
    BLOCKS_PER_SHARD,
    EpochSampler,
    ShardReader,
    ShardRows,
    deal_blocks,
    sample_rows,
)
from tests.builders import COLUMNS, YEAR, frame, month

NUM_SHARDS = 4


def write(tmp_path: Path, rows: pd.DataFrame, row_group_size: int = 100) -> Path:
    path = tmp_path / "data.parquet"
    rows.to_parquet(path, row_group_size=row_group_size, index=False)
    return path


def read(
    path: Path,
    window: TimeWindow = YEAR,
    rank: int = 0,
    num_ranks: int = 1,
    columns: DatasetSchema = COLUMNS,
) -> ShardRows:
    reader = ShardReader(path, columns, NUM_SHARDS, rank, num_ranks, lambda: None)
    return reader.read(window)


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 8))
def test_every_row_belongs_to_one_shard(groups: list[int], num_shards: int) -> None:
    owners = deal_blocks(groups, num_shards)
    assert [len(o) for o in owners] == groups
    assert all(0 <= shard < num_shards for o in owners for shard in o)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 8))
def test_shards_are_even_however_large_the_row_groups(
    num_groups: int, group_rows: int, num_shards: int
) -> None:
    sizes = np.bincount(
        np.concatenate(deal_blocks([group_rows] * num_groups, num_shards)), minlength=num_shards
    )
    num_rows = num_groups * group_rows
    one_block = num_rows / num_shards / BLOCKS_PER_SHARD
    assert sizes.sum() == num_rows
    assert np.ptp(sizes) <= 2 * one_block + 3 * BLOCKS_PER_SHARD


def test_small_row_groups_are_read_by_one_rank_alone() -> None:
    owners = deal_blocks([10] * 400, num_shards=8)
    assert all(np.ptp(o) == 0 for o in owners)


def test_the_ranks_rows_are_together_all_rows_of_the_window(tmp_path: Path) -> None:
    rows = frame(1500)
    path, window = write(tmp_path, rows), month(3, 4)
    inside = rows[(rows.event_timestamp >= window.start) & (rows.event_timestamp < window.end)]
    for num_ranks in (1, 2, 4):
        parts = [read(path, window, rank, num_ranks) for rank in range(num_ranks)]
        assert sum(part.num_rows for part in parts) == len(inside)
        seen = np.sort(np.concatenate([part.numeric[:, 2] for part in parts]))
        np.testing.assert_array_equal(seen, np.sort(inside["late_rate_24h"].to_numpy()))
        counted = sum(part.category_counts["dest"].get("ORD", 0) for part in parts)
        assert counted == (inside["dest"] == "ORD").sum()


def test_each_shard_holds_the_same_rows_for_any_number_of_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, frame(900))
    alone = read(path)
    slices = dict(alone.shard_slices())
    for rank in range(2):
        part = read(path, rank=rank, num_ranks=2)
        for shard, own in part.shard_slices():
            assert shard % 2 == rank
            np.testing.assert_array_equal(part.numeric[own], alone.numeric[slices[shard]])
            np.testing.assert_array_equal(part.codes[own], alone.codes[slices[shard]])
            np.testing.assert_array_equal(part.labels[own], alone.labels[slices[shard]])


def test_row_groups_outside_the_window_are_not_read(tmp_path: Path) -> None:
    read_groups: list[int] = []
    path = write(tmp_path, frame(1200))
    reader = ShardReader(path, COLUMNS, NUM_SHARDS, 0, 1, lambda: read_groups.append(1))
    assert reader.read(month(6)).num_rows > 0
    assert len(read_groups) <= 3


def test_global_batches_hold_the_same_rows_for_any_number_of_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, frame(900))

    def batches(num_ranks: int) -> list[list[np.ndarray]]:
        parts = [read(path, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        samplers = [EpochSampler(part, 10, 5, seed=3) for part in parts]
        return [
            [part.numeric[positions, 2] for part, positions in zip(parts, step, strict=True)]
            for step in zip(*(sampler.batches(1) for sampler in samplers), strict=True)
        ]

    for one, two in zip(batches(1), batches(2), strict=True):
        assert len(two[0]) == len(two[1]) == 20
        np.testing.assert_array_equal(np.sort(np.concatenate(one)), np.sort(np.concatenate(two)))


def test_an_epoch_repeats_no_row_and_another_epoch_has_another_order(tmp_path: Path) -> None:
    rows = read(write(tmp_path, frame(900)))
    sampler = EpochSampler(rows, 10, 5, seed=3)
    first, again, second = (np.concatenate(list(sampler.batches(e))) for e in (0, 0, 1))
    assert len(np.unique(first)) == len(first) == 200
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_the_sample_takes_equally_many_rows_of_each_shard(tmp_path: Path) -> None:
    rows = read(write(tmp_path, frame(900)))
    positions = sample_rows(rows, 30, seed=0)
    assert len(np.unique(positions)) == 30 * NUM_SHARDS
    everything = sample_rows(rows, 10_000, seed=0)
    assert np.array_equal(everything, np.arange(rows.num_rows))


def test_a_window_without_rows_gives_empty_shards(tmp_path: Path) -> None:
    rows = read(
        write(tmp_path, frame(300)),
        month(3).model_copy(update={"start": YEAR.end, "end": YEAR.end.replace(year=2015)}),
    )
    assert rows.num_rows == 0
    assert rows.numeric.shape == (0, len(COLUMNS.numeric))
    assert set(rows.sizes.values()) == {0}


@pytest.mark.parametrize("label", [2.0, None, -1.0, float("nan")])
def test_a_label_that_is_neither_0_nor_1_is_refused(tmp_path: Path, label: float | None) -> None:
    rows = frame(300).astype({"is_late": "float64"})
    rows.loc[17, "is_late"] = label
    with pytest.raises(DataContractError, match=r"1 of 300 rows have a label .*flight_id is 17\."):
        read(write(tmp_path, rows))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataContractError, match=r"lacks column\(s\) temp, gust"):
        read(write(tmp_path, frame(300).drop(columns=["temp", "gust"])))


def test_a_number_that_came_as_text_is_refused(tmp_path: Path) -> None:
    rows = frame(300).astype({"temp": "str"})
    with pytest.raises(DataContractError, match=r"column 'temp' is .*string.*; expected a number"):
        read(write(tmp_path, rows))


def test_times_without_a_zone_are_refused(tmp_path: Path) -> None:
    rows = frame(300)
    rows["event_timestamp"] = rows["event_timestamp"].dt.tz_localize(None)
    with pytest.raises(DataContractError, match="expected a timestamp with a time zone"):
        read(write(tmp_path, rows))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text("no parquet at all")
    with pytest.raises(DataContractError, match="cannot be read as Parquet"):
        read(path)


def test_a_schema_without_features_is_refused(tmp_path: Path) -> None:
    bare = COLUMNS.model_copy(update={"categorical": (), "numeric": ()})
    with pytest.raises(DataContractError, match="names no feature"):
        read(write(tmp_path, frame(300)), columns=bare)


def test_categories_that_are_integers_are_read_like_text(tmp_path: Path) -> None:
    rows = frame(300)
    rows["carrier"] = np.arange(300) % 3
    table = pa.Table.from_pandas(rows, preserve_index=False)
    path = tmp_path / "data.parquet"
    pq.write_table(table, path, row_group_size=50)
    assert set(read(path).category_counts["carrier"]) == {"0", "1", "2"}
