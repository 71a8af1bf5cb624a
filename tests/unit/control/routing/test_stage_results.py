"""What a stage's run returned: plain JSON only, checked against the flow's own type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect._internal.result_records import ResultRecordMetadata
from prefect.client.schemas.objects import FlowRun
from prefect.serializers import JSONSerializer, PickleSerializer
from prefect.states import Completed

from tasks.control.routing.task import (
    as_returned,
    child_error,
    on_class,
    read_plain,
    unmarked,
)
from tasks.kernel.errors import DataContractError, StageError, StageLostError
from tasks.registry.promotion import OpenQuestion
from tests.support.platform.routed_flows import Number, first_flow, second_flow
from tests.support.release.builders import refused


def completed(path: Path, serializer: Any) -> FlowRun:
    metadata = ResultRecordMetadata(storage_key=str(path), serializer=serializer)
    return FlowRun.model_construct(name="green-hare", state=Completed(data=metadata))


def test_a_result_comes_back_as_what_the_flow_returns(tmp_path: Path) -> None:
    value = (Number(value=14, digits=("1", "4")), Number(value=1, digits=("1",)))
    (tmp_path / "result").write_bytes(JSONSerializer().dumps(value))
    plain = read_plain(completed(tmp_path / "result", JSONSerializer()))
    assert as_returned(plain, second_flow) == value


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "result").write_bytes(PickleSerializer().dumps(Number(value=1, digits=())))
    with pytest.raises(StageError, match="'pickle'; only 'json' is read"):
        read_plain(completed(tmp_path / "result", PickleSerializer()))


def test_a_result_that_is_out_of_reach_says_what_to_share(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="PREFECT_DEFAULT_RESULT_STORAGE_BLOCK"):
        read_plain(completed(tmp_path / "absent", JSONSerializer()))


def test_a_question_that_an_earlier_version_kept_while_suspended_is_read_again() -> None:
    asked = OpenQuestion(digest="d", decision=refused(), markdown="m")
    kept = JSONSerializer().dumps(asked).replace(b"promotion.OpenQuest", b"question.OpenQuest")
    assert b"tasks.registry.question.OpenQuestion" in kept
    assert JSONSerializer().loads(kept) == asked


def test_no_class_that_a_result_names_is_imported() -> None:
    marked = {"__class__": "os.system", "data": {"value": 2, "digits": []}}
    assert as_returned(unmarked(marked), first_flow) == Number(value=2, digits=())


@given(st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_plain_values_pass_unchanged(value: Any) -> None:
    assert unmarked(value) == value
    assert unmarked({"__class__": "any.thing", "data": [value]}) == [value]


def test_training_that_falls_back_to_the_cpu_computes_there_and_nothing_else_changes() -> None:
    asked = {"config": {"training": {"device": "cuda", "num_workers": 2}}, "window": None}
    expected = {"config": {"training": {"device": "cpu", "num_workers": 2}}, "window": None}
    assert on_class(asked, "cpu") == expected
    assert on_class(asked, "gpu") == asked
    assert on_class({"number": 3}, "cpu") == {"number": 3}


BEFORE = "Flow run encountered an exception: "
AWAY = "PrefectHTTPStatusError: Server error '500 ..."
REFUSED = "PrefectHTTPStatusError: Client error '404 ..."


@pytest.mark.parametrize(
    ("message", "kind", "sentence"),
    [
        (f"{BEFORE}DataContractError: 3 nulls: none", DataContractError, "3 nulls: none"),
        (f"{BEFORE}ValueError: seen 3", StageError, f"{BEFORE}ValueError: seen 3"),
        (f"{BEFORE}StageLostError: a\nb", StageLostError, "a\nb"),
        (f"{BEFORE}ConnectError: none", StageLostError, "the Prefect API was away: none"),
        (BEFORE + AWAY, StageLostError, "the Prefect API was away: Server error '500 ..."),
        (BEFORE + REFUSED, StageError, BEFORE + REFUSED),
        ("", StageError, ""),
    ],
)
def test_a_stages_own_error_is_raised_with_its_sentence(
    message: str, kind: type[Exception], sentence: str
) -> None:
    error = child_error(message, "run x")
    assert type(error) is kind
    assert str(error) == f"{sentence} (run x)"
