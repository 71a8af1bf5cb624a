"""What the bench of conversion makes of its measurements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.bench.conversion.encoder import TOKENS, full_texts
from infra.bench.conversion.variants import best_of
from infra.bench.figures import at_least
from tasks.contracts.conversion import PreparedRows
from tasks.conversion.measure import Timing
from tasks.kernel.settings import ArtifactStore, StagedFolder


def timing(*milliseconds: float) -> Timing:
    taken = np.array(milliseconds)
    return Timing(taken, taken, taken)


TIMES = {"floats": timing(4, 8, 4), "halves": timing(2, 4, 2), "bytes": timing(1, 2, 9)}


def test_the_best_form_is_that_of_the_least_share_within_a_turn() -> None:
    share, told = best_of(TIMES, ["halves", "bytes"], "floats")
    assert share == 0.25
    assert told == "bytes 2.000 ms, floats 4.000 ms"


def test_a_figure_that_no_form_reaches_misses() -> None:
    share, told = best_of(TIMES, [], "floats")
    assert not at_least("encoder", 1 / share, 2.0, told).holds
    assert told == "no form passes"


def test_timed_texts_have_their_length_without_padding(tmp_path: Path) -> None:
    ids = [[1, *range(10, 10 + length), 2] for length in (5, 40, 60)]

    def build(folder: StagedFolder) -> PreparedRows:
        table = pa.table({"part": ["judged"] * 3, "input_ids": ids})
        pq.write_table(table, folder.path / "texts.parquet")
        data = folder.artifact("texts.parquet")
        return PreparedRows(data=data, num_calibration=1, num_judged=3, made_from={})

    store = ArtifactStore(tmp_path)
    texts = full_texts(store.build_once("corpora", "texts", PreparedRows, build), store, 3)
    assert texts["input_ids"].shape == (3, TOKENS)
    assert texts["attention_mask"].all()
    assert set(texts["input_ids"][:, -1]) == {2}
