"""Labels that come later: how they are taken in, and which row gets which."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serving.interfaces import Call
from tasks.kernel.errors import DataContractError
from tasks.predictions.labels import JoinTally, import_labels, labelled_rows
from tasks.predictions.reading import LogQuery
from tasks.predictions.schema import labels_folder
from tests.support.data.builders import frame
from tests.support.serving.served_rows import MODEL, NOW, batch_of, entity_batch, open_log, served

LATER = NOW + timedelta(days=2)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return frame(50).head(4)


@pytest.fixture
def home(tmp_path: Path, rows: pd.DataFrame) -> Path:
    """Two requests of two rows each; the second was mirrored to a shadow."""
    with open_log(tmp_path) as log:
        log.served(batch_of(rows, ["a", "b"], rows_each=2))
        log.served(batch_of(rows.tail(2), ["b"], served("2", "shadow"), rows_each=2))
    return tmp_path


def give(home: Path, **columns: Any) -> Any:
    table = pd.DataFrame(columns)
    file = home / "labels.parquet"
    table.to_parquet(file, index=False)
    return import_labels(home, MODEL, file, LATER)


def join(
    home: Path, known_by: datetime = LATER, **options: Any
) -> tuple[dict[Any, Any], JoinTally]:
    tally = JoinTally()
    columns = ["request_id", "request_row", "slot"]
    found: dict[Any, Any] = {}
    for table in labelled_rows(
        home, LogQuery(MODEL), columns, known_by=known_by, tally=tally, **options
    ):
        for row in table.to_pylist():
            found[row["request_id"], row["request_row"], row["slot"]] = row["label"]
    return found, tally


def test_labels_meet_their_rows_in_every_track_and_the_rest_is_counted(home: Path) -> None:
    taken = give(
        home, request_id=["a", "b", "b", "unknown"], request_row=[0, 0, 1, 0], label=[1, 0, None, 1]
    )
    assert (taken.kind, taken.rows, taken.without_label) == ("request", 3, 1)
    found, tally = join(home)
    assert found == {
        ("a", 0, "stable"): 1.0,
        ("a", 1, "stable"): None,
        ("b", 0, "stable"): 0.0,
        ("b", 1, "stable"): None,
        ("b", 0, "shadow"): 0.0,
        ("b", 1, "shadow"): None,
    }
    assert (tally.rows, tally.labelled, tally.unmatched) == (6, 3, 1)


def test_of_two_labels_the_later_holds_and_a_contradiction_is_none(home: Path) -> None:
    give(
        home,
        request_id=["a", "a", "b", "b"],
        label=[0, 1, 0, 1],
        known_at=[NOW, NOW + timedelta(hours=1), NOW, NOW],
    )
    found, tally = join(home)
    assert found["a", 0, "stable"] == 1.0
    assert found["b", 0, "stable"] is None
    assert (tally.corrected, tally.conflicting) == (1, 1)


def test_what_was_not_known_by_then_is_left_out(home: Path) -> None:
    known = [NOW + timedelta(hours=1), NOW + timedelta(hours=30)]
    give(home, request_id=["a", "b"], label=[1, 1], known_at=known)
    found, _ = join(home, known_by=NOW + timedelta(hours=2))
    assert found["a", 0, "stable"] == 1.0
    assert found["b", 0, "stable"] is None


def test_the_same_table_twice_is_there_once(home: Path) -> None:
    first = give(home, request_id=["a"], label=[1])
    assert give(home, request_id=["a"], label=[1]).file == first.file
    assert len(list(labels_folder(home, MODEL).iterdir())) == 1
    _, tally = join(home)
    assert (tally.corrected, tally.labelled) == (0, 1)


def test_labels_of_entities_meet_the_nearest_moment(tmp_path: Path, rows: pd.DataFrame) -> None:
    plain = batch_of(rows, ["x"], rows_each=4)
    keys = {"origin": ["JFK", "JFK", "LGA", None], "flight": [1, 2, 1, 1]}
    asked = Call(MODEL, {}, 4, "x", entities=keys, arrived=plain.finished)
    with open_log(tmp_path) as log:
        log.served(replace(plain, calls=(asked,)))
    offset = timedelta(days=3650)
    moments = [NOW - offset + timedelta(minutes=m) for m in (-3, 1, 40)]
    taken = give(
        tmp_path,
        origin=["JFK", "JFK", "LGA"],
        flight=[1, 1, 1],
        event_timestamp=moments,
        label=[0.0, 1.0, 1.0],
    )
    assert taken.kind == "entity"
    found, tally = join(tmp_path, shift=-offset)
    assert [found["x", n, "stable"] for n in range(4)] == [1.0, None, None, None]
    assert tally.unmatched == 2
    give(tmp_path, request_id=["x"], label=[5.0])
    assert join(tmp_path, shift=-offset)[0]["x", 0, "stable"] == 5.0, "the request's own holds"


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"request_id": ["a"]}, "has no column 'label'"),
        ({"label": [1.0]}, "expected request_id, or entity keys"),
        ({"request_id": ["a"], "label": ["late"]}, "expected numbers as labels"),
        ({"request_id": ["a"], "label": [np.inf]}, "labels that are NaN or infinite"),
        ({"request_id": [None], "label": [1.0]}, "nulls in request_id"),
    ],
)
def test_a_table_that_holds_no_labels_is_refused(
    tmp_path: Path, columns: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataContractError, match=f"{sentence}.*Nothing was imported"):
        give(tmp_path, **columns)


def test_a_label_of_more_keys_holds_and_one_of_a_key_that_is_not_logged_meets_no_row(
    tmp_path: Path,
) -> None:
    keys = {"origin": ["JFK", "JFK"], "flight": [1, 2]}
    with open_log(tmp_path) as log:
        log.served(entity_batch(["x", "y"], keys, NOW))
    of_origin = {"origin": ["JFK"], "event_timestamp": [NOW]}
    give(tmp_path, **of_origin, label=[0.0])
    give(tmp_path, **of_origin, flight=[1], label=[1.0])
    give(tmp_path, **of_origin, note=["delayed"], label=[3.0])
    found, tally = join(tmp_path)
    assert found == {("x", 0, "stable"): 1.0, ("y", 0, "stable"): 0.0}
    assert tally.unmatched == 1
