from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.training import TrainedModel
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import COLUMNS, frame
from tests.support.ranks.runs import NUM_ROWS, config, losses, on_ranks, run_ranks, train

NUM_EPOCHS = 2
POOLS = {"reading": {"shuffle_rows": 512}}


def trained(folder: Path, num_ranks: int, **changes: object) -> TrainedModel:
    return train(folder, config(max_epochs=NUM_EPOCHS, **on_ranks(num_ranks), **changes))


def log_of(model: TrainedModel, folder: Path) -> str:
    return ArtifactStore(folder / "store").path(model.log).read_text()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return trained(tmp_path_factory.mktemp("two"), 2, **POOLS)


@pytest.mark.slow
def test_three_ranks_share_four_shards_and_train_like_two(
    two_ranks: TrainedModel, tmp_path: Path
) -> None:
    model = trained(tmp_path, 3, **POOLS)
    held = re.findall(r"rank (\d) \| INFO holds (\d+) of (\d+) training", log_of(model, tmp_path))
    rows = {int(rank): int(own) for rank, own, _ in held}
    assert sum(rows.values()) == int(held[0][2])
    assert rows[0] > 1.5 * rows[1]  # shards 0 and 3
    np.testing.assert_allclose(losses(model.epochs), losses(two_ranks.epochs), atol=1e-4)


@pytest.mark.slow
def test_a_rank_that_gets_no_rows_takes_part_in_every_step(tmp_path: Path) -> None:
    model = trained(tmp_path / "three", 3, num_shards=2, **POOLS)
    alone = trained(tmp_path / "one", 1, num_shards=2, **POOLS)
    assert "rank 2 | WARNING holds no rows: part 2 of 3" in log_of(model, tmp_path / "three")
    np.testing.assert_allclose(losses(model.epochs), losses(alone.epochs), atol=1e-4)


def snapshot_of(rows: pd.DataFrame, folder: Path) -> Path:
    path = folder / "snapshot.parquet"
    rows.to_parquet(path, row_group_size=256, index=False)
    return path


@pytest.mark.slow
def test_a_label_that_is_no_number_in_one_ranks_shard_ends_the_run_with_a_sentence(
    tmp_path: Path,
) -> None:
    rows = frame(NUM_ROWS).astype({COLUMNS.label: "float64"})
    rows.loc[40, COLUMNS.label] = np.nan
    with pytest.raises(DataContractError) as caught:
        run_ranks(tmp_path, config(**POOLS), snapshot_of(rows, tmp_path))
    assert re.match(
        r"rank [01]: DataContractError: 1 of \d+ rows have a label that is neither 0 nor 1; the "
        r"first is nan .* flight_id is 40\.",
        str(caught.value),
    )
    assert [path for path in tmp_path.rglob("*.aside")] == []
