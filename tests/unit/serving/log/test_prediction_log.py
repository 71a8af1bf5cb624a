"""The observer that logs predictions: what is logged is what was served, or is counted."""

import weakref
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BackendError, DeadlineError, OverloadedError
from serving.interfaces import Call, Served
from serving.log.prediction_log import PredictionLog
from tasks.contracts.data import category_code
from tasks.kernel.errors import ConfigurationError
from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.schema import FIXED, log_root, mask_key_file, model_folder
from tests.support.data.builders import COLUMNS, frame
from tests.support.host.processes import wait_until
from tests.support.serving.served_rows import (
    MODEL,
    NOW,
    batch_of,
    call,
    fields,
    open_log,
    rows_of,
    served,
    signature_of,
)
from tests.support.suite.examples import examples

FRAME = frame(400)


def test_a_batch_of_single_rows_is_logged_as_it_was_served(tmp_path: Path) -> None:
    rows = FRAME.head(50)
    batch = batch_of(rows, [f"r{n}" for n in range(50)], subject="carol")
    with open_log(tmp_path) as log:
        log.served(batch)
    assert log.counters()["logged_rows"] == 50
    found = rows_of(tmp_path)
    assert found["request_id"].tolist() == [f"r{n}" for n in range(50)]
    assert set(found["request_row"]) == {0}
    np.testing.assert_array_equal(found["score"], batch.outputs["score"].astype(np.float64))
    np.testing.assert_array_equal(found["f:distance"], rows["distance"].to_numpy(dtype=np.float32))
    assert found["f:carrier"].tolist() == [category_code(c) for c in rows["carrier"]]
    for name, value in {
        **{"model": MODEL, "version": "1", "variant": "onnx-fp32", "slot": "stable"},
        **{"hardware": "cpu", "subject": "carol", "batch_rows": 50, "latency_us": 2000},
        **{"compute_us": 1000},
    }.items():
        assert set(found[name]) == {value}, name
    assert found["error"].isna().all()
    assert found["event_timestamp"].dt.tz is not None
    assert abs((found["event_timestamp"] - NOW).dt.total_seconds()).max() < 0.001
    assert list(found.columns[: len(FIXED.names)]) == FIXED.names


def test_a_part_lies_below_its_model_and_utc_day_and_nobody_else_may_look(tmp_path: Path) -> None:
    midnight = datetime(2090, 3, 1, tzinfo=UTC)
    with open_log(tmp_path) as log:
        log.served(batch_of(FRAME.head(2), ["a", "b"], at=midnight))
        before = datetime(2090, 2, 28, 23, 59, 59, 990_000, tzinfo=UTC)
        log.served(batch_of(FRAME.head(1), ["c"], at=before))
    days = {p.parent.name: p for p in model_folder(tmp_path, MODEL).glob("day=*/part-*.parquet")}
    assert set(days) == {"day=2090-02-28", "day=2090-03-01"}
    assert log_root(tmp_path).stat().st_mode & 0o077 == 0


def test_answers_of_several_numbers_are_a_list_and_long_ones_are_left_out(tmp_path: Path) -> None:
    few = np.arange(12, dtype=np.float32).reshape(3, 4)
    many = np.zeros((2, 100), np.float32)
    with open_log(tmp_path) as log:
        log.served(batch_of(FRAME.head(3), ["a", "b", "c"], scores=few))
        log.served(batch_of(FRAME.head(2), ["d", "e"], scores=many, by=served("2")))
    found = rows_of(tmp_path, versions=["1"])
    assert [list(s) for s in found["scores"]] == few.tolist()
    assert found["score"].isna().all()
    assert rows_of(tmp_path, versions=["2"])["scores"].isna().all()


def test_entity_requests_log_keys_ages_and_states(tmp_path: Path) -> None:
    class Answer:
        view_names = ("weather", "planes")
        age_s = np.array([[60.0, 120.0], [np.nan, 5.0]])
        state = np.array([[0, 1], [2, 0]], np.uint8)

    asked = Call(MODEL, {}, 2, "by-entity", entities={"origin": ["JFK", None]}, features=Answer())
    plain = batch_of(FRAME.head(3), ["plain"], rows_each=1)
    with open_log(tmp_path) as log:
        log.served(replace(plain, calls=(asked, call(1, "plain"))))
    found = rows_of(tmp_path)
    assert found["e:origin"].tolist()[0] == "JFK"
    assert found["e:origin"].isna().tolist() == [False, True, True]
    assert found["state:weather"].tolist()[:2] == ["fresh", "stale"]
    assert found["state:planes"].tolist()[:2] == ["missing", "fresh"]
    assert found["age_s:weather"].tolist()[:2] == [60.0, 120.0]
    assert found["age_s:planes"].isna().tolist() == [True, False, True]


def test_refusals_are_logged_at_a_bounded_rate_and_never_for_unknown_models(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.refused(Call("../made-up", {}, 1, "x"), OverloadedError("full"))
        for number in range(1000):
            log.refused(call(7, f"r{number}", subject="dave"), OverloadedError("full"))
    counters = log.counters()
    found = rows_of(tmp_path)
    assert counters["refused_requests"] == 1001
    assert counters["dropped_rows"]["refusal_unknown_model"] == 1
    assert len(found) + counters["dropped_rows"]["refusal_rate"] == 1000
    assert 10 <= len(found) < 500
    assert set(found["error"]) == {"overloaded"}
    assert found["score"].isna().all()
    assert set(found["batch_rows"]) == {7}
    assert [f.name for f in log_root(tmp_path).glob("model=*")] == [f"model={MODEL}"]


def test_a_refused_call_lets_its_arrays_go_before_it_is_written(tmp_path: Path) -> None:
    values = np.ones((3, 2), np.float32)
    held = weakref.ref(values)
    with open_log(tmp_path) as log:
        log.refused(Call(MODEL, {"values": values}, 3, "r", features=[values]), BackendError("no"))
        del values
        assert held() is None
    assert rows_of(tmp_path)["batch_rows"].tolist() == [3]


def test_failures_name_the_version_that_was_to_answer(tmp_path: Path) -> None:
    stable = {"stable": "7"}
    with open_log(tmp_path, answering=lambda model, track: stable.get(track)) as log:
        for number in range(20):  # more than refusals may be
            log.refused(call(1, f"r{number}"), BackendError("it fell"))
        log.refused(call(1, "named", version="3"), DeadlineError("too late"))
        log.refused(call(1, "shadow", track="shadow"), BackendError("it fell"))
    found = rows_of(tmp_path, answered=False).set_index("request_id")["version"]
    assert len(found) == 22
    assert found["r0"] == found["r19"] == "7"
    assert found["named"] == "3"
    assert found[["shadow"]].isna().all()


@pytest.mark.parametrize("name", ["masked", "left_out"])
def test_hidden_fields_are_nowhere_in_the_files(tmp_path: Path, name: str) -> None:
    rows = FRAME.head(20).assign(carrier="AA")
    secret = np.int32(category_code("AA")).tobytes()
    features = type("F", (), {"view_names": (), "age_s": (), "state": ()})()
    entity = Call(MODEL, {}, 20, "e", entities={"tailnum": ["N12345"] * 20}, features=features)
    plain = batch_of(rows, [f"r{n}" for n in range(20)], subject="carol@example.org")
    hidden = {name: ("subject", "carrier", "tailnum")}
    with open_log(tmp_path, partial(fields, "tailnum"), **hidden) as log:
        log.served(plain)
        log.served(replace(plain, calls=(entity,)))
    assert log.counters()["logged_rows"] == 40
    for part in log_root(tmp_path).rglob("*.parquet"):
        content = part.read_bytes()
        for value in (b"carol@example.org", b"N12345", secret * 2):
            assert value not in content
    found = rows_of(tmp_path)
    decoded = str(found.to_dict())  # what compression may have hidden above
    for text in ("carol", "N12345", str(category_code("AA"))):
        assert text not in decoded
    if name == "left_out":
        assert "f:carrier" not in found
        assert "e:tailnum" not in found
        assert found["subject"].isna().all()
    else:
        assert found["f:carrier"].nunique() == 1
        assert set(found["subject"].map(len)) == {32}
        assert found["e:tailnum"].nunique() == 1
        assert mask_key_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_misspelt_field_to_hide_ends_the_start_once_all_are_known(tmp_path: Path) -> None:
    known = partial(fields, "tailnum", is_whole=False)
    config = PredictionLogConfig(masked=("carier",))
    log = PredictionLog(config, tmp_path, signature_of, lambda: known())
    log.check()  # the feature registry is away: it may be a key
    log.start()
    log.served(batch_of(FRAME.head(2), ["a", "b"]))
    known = partial(fields, "tailnum")
    with pytest.raises(ConfigurationError, match=r"log.masked names 'carier'.*expected of carrier"):
        log.check()
    log.served(batch_of(FRAME.head(1), ["c"]))
    log.stop()
    assert log.counters()["dropped_rows"] == {"unchecked": 3}


def test_a_hidden_key_is_no_misspelt_name_while_keys_cannot_be_read(tmp_path: Path) -> None:
    known = partial(fields, is_whole=False)
    with open_log(tmp_path, lambda: known(), masked=("tailnum",)) as log:
        log.served(batch_of(FRAME.head(2), ["a", "b"]))
        known = partial(fields, "tailnum")
        log.served(batch_of(FRAME.head(3), ["c", "d", "e"]))
    counters = log.counters()
    assert (counters["dropped_rows"]["unchecked"], counters["logged_rows"]) == (2, 3)


def test_a_batch_that_cannot_be_logged_costs_only_itself(tmp_path: Path) -> None:
    good = batch_of(FRAME.head(2), ["a", "b"])
    lacks = replace(good, inputs={})
    empty = replace(lacks, outputs={})
    with open_log(tmp_path) as log:
        for batch in (good, lacks, empty, good):
            log.served(batch)
    assert log.counters()["dropped_rows"]["error"] == 4
    assert len(rows_of(tmp_path)) == 4


def test_nothing_is_written_where_the_log_is_off(tmp_path: Path) -> None:
    with open_log(tmp_path, enabled=False) as log:
        log.served(batch_of(FRAME.head(2), ["a", "b"]))
        log.refused(call(1, "r"), OverloadedError("full"))
    assert not log.counters()["dropped_rows"]
    assert not log_root(tmp_path).exists()


def test_rows_are_on_the_disk_before_the_log_is_stopped(tmp_path: Path) -> None:
    with open_log(tmp_path, flush_s=0.2) as log:
        log.served(batch_of(FRAME.head(3), ["a", "b", "c"]))
        wait_until(lambda: log.counters()["logged_rows"] == 3, "three rows are written")
        assert len(rows_of(tmp_path)) == 3


Sizes = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["1", "2"])), max_size=12
)


@examples(15)
@given(sizes=Sizes, limit=st.sampled_from([8, 40, 10_000]))
def test_what_is_logged_is_what_was_served_less_what_was_counted(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int, str]], limit: int
) -> None:
    home = tmp_path_factory.mktemp("home")
    sent: dict[tuple[str, int], tuple[str, float, float]] = {}
    with open_log(home, queue_rows=limit) as log:
        for number, (num_calls, rows_each, version) in enumerate(sizes):
            rows = FRAME.sample(num_calls * rows_each, random_state=number)
            ids = [f"{number}-{n}" for n in range(num_calls)]
            batch = batch_of(rows, ids, Served(MODEL, version, "v", "shadow", "cpu"), rows_each)
            log.served(batch)
            for row, (score, temp) in enumerate(
                zip(batch.outputs["score"], batch.inputs["numeric"][:, 3], strict=True)
            ):
                key = (ids[row // rows_each], row % rows_each)
                sent[key] = (version, float(score), float(temp))
    counters = log.counters()
    dropped = sum(counters["dropped_rows"].values())
    found = rows_of(home)
    assert len(found) + dropped == len(sent)
    seen = {}
    for row in found.to_dict("records"):
        key = (row["request_id"], row["request_row"])
        assert key not in seen, "a row was logged twice"
        seen[key] = (row["version"], row["score"], row["f:temp"])
    assert seen.items() <= sent.items()


assert COLUMNS.numeric[3] == "temp"
