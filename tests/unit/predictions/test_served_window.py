"""What was served in a window, as rows that a drift check compares with its reference."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.base import Artifact
from tasks.contracts.data import ValidatedDataset, category_code
from tasks.contracts.drift import ServedWindow, TooFewPredictions
from tasks.contracts.release import RegisteredProgram
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.predictions.labels import import_labels
from tasks.predictions.served_window import count_served, take_served_window
from tests.support.data.builders import (
    CLASSES,
    COLUMNS,
    class_frame,
    dataset,
    frame,
    month,
    rows_in,
    version_ref,
)
from tests.support.serving.served_rows import MODEL, batch_of, log_frame, open_log, served

FRAME = frame(2000)
WINDOW = month(10)
OFFSET = timedelta(days=77 * 365)
LATER = datetime(2100, 1, 1, tzinfo=UTC)
CHAMPION = RegisteredProgram.model_validate(
    {
        "version": version_ref("a" * 64, name=MODEL, version=1),
        "program": Artifact(uri="artifact:x", sha256="a" * 64, num_bytes=1),
        "columns": COLUMNS,
    }
)


@pytest.fixture
def reference(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store, FRAME)


def take(
    home: Path, reference: ValidatedDataset, store: ArtifactStore, **limits: int
) -> ServedWindow | TooFewPredictions:
    least = {"min_rows": 1, "min_days": 1, **limits}
    return take_served_window(
        home, CHAMPION, reference, WINDOW, OFFSET, **least, store=store, now=LATER
    )


def taken(home: Path, reference: ValidatedDataset, store: ArtifactStore) -> Any:
    window = take(home, reference, store)
    assert isinstance(window, ServedWindow)
    return window, pd.read_parquet(store.path(window.dataset.snapshot.data))


def log_once(home: Path, rows: pd.DataFrame, **config: Any) -> None:
    moment = rows[COLUMNS.event_time].iloc[0].to_pydatetime() + OFFSET
    with open_log(home, **config) as log:
        log.served(batch_of(rows, [f"r-{n}" for n in rows[COLUMNS.row_id]], at=moment))


def test_served_rows_come_back_as_the_reference_writes_them(
    tmp_path: Path, store: ArtifactStore, reference: ValidatedDataset
) -> None:
    rows = rows_in(WINDOW, FRAME)
    rows.loc[0, "carrier"] = "ZZ"  # the reference has never seen it
    log_frame(tmp_path, rows, OFFSET, size=1)
    log_frame(tmp_path, rows, OFFSET, served("2"))
    log_frame(tmp_path, rows, OFFSET, served("1", "shadow"))
    labels = pd.DataFrame({"request_id": [f"r-{n}" for n in rows[COLUMNS.row_id]][:7], "label": 1})
    labels.to_parquet(tmp_path / "labels.parquet")
    import_labels(tmp_path, MODEL, tmp_path / "labels.parquet", LATER - timedelta(days=1))

    window, found = taken(tmp_path, reference, store)

    assert len(found) == len(rows)
    found = found.sort_values(COLUMNS.event_time, kind="stable").reset_index(drop=True)
    assert found["carrier"][0] == f"code:{category_code('ZZ')}"
    for name in COLUMNS.categorical:
        known = found[name].where(found[name].notna(), None).tolist()[1:]
        assert known == rows[name].where(rows[name].notna(), None).tolist()[1:], name
    for name in COLUMNS.numeric:
        np.testing.assert_array_equal(found[name], rows[name].to_numpy(np.float32), err_msg=name)
    gap = (found[COLUMNS.event_time] - rows[COLUMNS.event_time]).abs().max()
    assert gap < timedelta(milliseconds=5)
    assert found[COLUMNS.label].notna().sum() == 7
    assert window.num_labelled == 7
    assert window.dataset.snapshot.window == WINDOW
    assert window.left_out == ()
    assert "request_id" not in found
    logged = window.logged
    assert count_served(tmp_path, MODEL, "1", logged) == len(rows)


def test_scores_of_several_classes_come_back_by_class_with_labels_by_name(
    tmp_path: Path, store: ArtifactStore
) -> None:
    data = class_frame(2000)
    reference = dataset(store, data, CLASSES)
    rows = rows_in(WINDOW, data).head(40)
    scores = np.tile(np.array([[0.2, 0.7, 0.1], [0.1, 0.3, 0.6]], np.float32), (20, 1))
    names = [f"r-{n}" for n in rows[COLUMNS.row_id]]
    moment = rows[COLUMNS.event_time].iloc[0].to_pydatetime() + OFFSET
    with open_log(tmp_path) as log:
        log.served(batch_of(rows, names, at=moment, scores=scores))
    labels = tmp_path / "labels.parquet"
    pd.DataFrame({"request_id": names[:3], "label": ["late", "early", None]}).to_parquet(labels)
    import_labels(tmp_path, MODEL, labels, LATER - timedelta(days=1), CLASSES.classes)
    pd.DataFrame({"request_id": names[:1], "label": ["lost"]}).to_parquet(labels)
    with pytest.raises(DataContractError, match=r"'lost'.* no class in 1 rows; expected early"):
        import_labels(tmp_path, MODEL, labels, LATER, CLASSES.classes)

    champion = CHAMPION.model_copy(update={"columns": CLASSES})
    window = take_served_window(
        tmp_path, champion, reference, WINDOW, OFFSET, 1, 1, store=store, now=LATER
    )
    assert isinstance(window, ServedWindow)
    found = pd.read_parquet(store.path(window.scores))
    np.testing.assert_array_equal(found[["score_0", "score_1", "score_2"]], scores)
    assert found["predicted"].tolist()[:2] == ["on time", "late"]
    assert found[CLASSES.label].tolist()[:2] == [2.0, 0.0]
    assert found[CLASSES.label].notna().sum() == 2


def test_a_masked_category_is_told_by_the_key_and_a_masked_number_is_left_out(
    tmp_path: Path, store: ArtifactStore, reference: ValidatedDataset
) -> None:
    rows = rows_in(WINDOW, FRAME).head(40)
    log_once(tmp_path, rows, masked=("carrier", "distance"), left_out=("temp",))
    window, found = taken(tmp_path, reference, store)
    assert found["carrier"].tolist() == rows["carrier"].tolist()
    assert window.left_out == ("distance", "temp")
    for data in (window.dataset, window.reference):
        assert data.snapshot.columns.numeric == ("minute_of_day", "late_rate_24h", "gust")
    assert "not compared, since the log hides them: distance, temp" in window.told


def test_too_few_rows_or_days_are_said(
    tmp_path: Path, store: ArtifactStore, reference: ValidatedDataset
) -> None:
    nothing = take(tmp_path, reference, store)
    assert isinstance(nothing, TooFewPredictions)
    assert nothing.num_rows == 0
    log_once(tmp_path, rows_in(WINDOW, FRAME).head(40))
    few = take(tmp_path, reference, store, min_rows=41)
    assert isinstance(few, TooFewPredictions)
    assert "has 40 rows on 1 UTC days that version 1" in few.reason
    short = take(tmp_path, reference, store, min_days=2)
    assert isinstance(short, TooFewPredictions)
    assert (short.num_rows, short.num_days) == (40, 1)


def test_a_log_that_hides_everything_or_holds_no_scores_is_a_sentence(
    tmp_path: Path, store: ArtifactStore, reference: ValidatedDataset
) -> None:
    rows = rows_in(WINDOW, FRAME).head(4)
    log_once(tmp_path / "hidden", rows, left_out=(*COLUMNS.categorical, *COLUMNS.numeric))
    with pytest.raises(DataContractError, match="has none of the 5 numbers and 3 categories"):
        take(tmp_path / "hidden", reference, store)
    with open_log(tmp_path / "odd") as log:
        moment = rows[COLUMNS.event_time].iloc[0].to_pydatetime() + OFFSET
        scores = np.array([0.5, np.nan, 0.5, 0.5], np.float32)
        log.served(batch_of(rows, ["a", "b", "c", "d"], at=moment, scores=scores))
    with pytest.raises(DataContractError, match="no single finite number"):
        take(tmp_path / "odd", reference, store)
