import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks.kernel.errors import DataContractError
from tasks.training.data.opening import num_readers
from tasks.training.data.preprocess import Preprocessing
from tests.support.data.builders import COLUMNS, frame, splits
from tests.support.training.reading_ranks import job, opened


def assert_same(one: Preprocessing, other: Preprocessing) -> None:
    assert one.flagged == other.flagged
    for a, b in zip(
        (*one.vocabularies, *one.edges), (*other.vocabularies, *other.edges), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_any_number_of_ranks_fits_the_same_preprocessing(tmp_path: Path, size: int) -> None:
    (alone,) = opened(job(tmp_path), tmp_path, 1)
    assert any(map(len, alone.preprocessing.edges))
    assert alone.preprocessing.flagged == (COLUMNS.numeric.index("gust"),)
    ranks = opened(job(tmp_path), tmp_path, size)
    for sources in ranks:
        assert_same(sources.preprocessing, alone.preprocessing)
        assert sources.plan == alone.plan
    assert sum(sources.training.num_rows for sources in ranks) == alone.training.num_rows
    assert sum(sources.validation.num_rows for sources in ranks) == alone.validation.num_rows


def test_the_bins_are_fitted_on_a_sample_where_there_are_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = opened(job(tmp_path), tmp_path, 1)
    monkeypatch.setattr("tasks.training.data.opening.MAX_SAMPLE_ROWS", 80)
    one, other = (opened(job(tmp_path), tmp_path, size)[0].preprocessing for size in (1, 3))
    assert_same(one, other)
    late_rate = COLUMNS.numeric.index("late_rate_24h")
    assert not np.array_equal(one.edges[late_rate], whole.preprocessing.edges[late_rate])


def test_ranks_that_have_changed_find_the_decoded_rows_of_earlier_ones(tmp_path: Path) -> None:
    work = job(tmp_path)
    before = opened(work, tmp_path, 3)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.rows")}
    assert len(files) == 2 * work.config.num_shards
    after = opened(work, tmp_path, 2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.rows")} == files
    assert_same(before[0].preprocessing, after[0].preprocessing)
    assert before[0].plan == after[1].plan


def test_a_rank_that_gets_no_shard_takes_part_in_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ranks = opened(job(tmp_path, num_shards=2), tmp_path, 3)
    assert ranks[2].training.num_rows == ranks[2].validation.num_rows == 0
    assert "holds no rows: part 2 of 3 gets none of the shards" in caplog.text
    steps = [len(list(sources.training.batches(0))) for sources in ranks]
    assert steps == [ranks[0].plan.num_steps] * 3


def test_a_window_without_both_labels_is_refused(tmp_path: Path) -> None:
    rows = frame(1600)
    in_july = rows.event_timestamp >= splits().validation.start
    rows.loc[in_july, COLUMNS.label] = 0
    with pytest.raises(DataContractError, match=r"validation window .* is 0 in all of them"):
        opened(job(tmp_path, rows), tmp_path, 2)


def test_an_empty_shard_is_refused_with_the_fix(tmp_path: Path) -> None:
    rows = frame(1600).astype({COLUMNS.label: "int64"})
    first = rows[rows.event_timestamp < splits().validation.start].head(3)
    few = pd.concat([first, rows[rows.event_timestamp >= splits().validation.start]])
    few.loc[first.index, COLUMNS.label] = [0, 1, 0]
    with pytest.raises(DataContractError, match=r"have no training rows: .*lower num_shards"):
        opened(job(tmp_path, few, num_shards=16), tmp_path, 1)


@pytest.mark.parametrize(
    ("device", "cores", "local_size", "expected"),
    [
        ("cpu", 16, 1, 0),
        ("cuda", 16, 1, 8),
        ("cuda", 16, 4, 3),
        ("cuda", 16, 8, 1),
        ("cuda", 1, 1, 1),
    ],
)
def test_a_gpus_rank_reads_ahead_on_the_cores_that_are_free(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, local_size: int, expected: int
) -> None:
    monkeypatch.setattr("tasks.training.data.opening.usable_cores", lambda: cores)
    assert num_readers(device, local_size) == expected
