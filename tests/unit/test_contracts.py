import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import (
    DataSplits,
    MaterializedView,
    TableRef,
    ValidatedDataset,
    category_code,
)
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import BuiltVariant, ModelVariant, TritonRepository
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders

NOON = datetime(2013, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        (NOON, NOON, "is empty"),
        (NOON, NOON - timedelta(days=1), "is reversed"),
        (NOON.replace(tzinfo=None), NOON, "start .* has no time zone"),
        (NOON, (NOON + timedelta(days=1)).replace(tzinfo=None), "end .* has no time zone"),
    ],
)
def test_a_window_that_is_none_is_refused_with_the_reason(
    start: datetime, end: datetime, said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        TimeWindow(start=start, end=end)


def test_a_window_may_end_now_but_not_later() -> None:
    window = TimeWindow(start=NOON, end=NOON + timedelta(hours=1))
    window.check_not_in_future(NOON + timedelta(hours=1))
    with pytest.raises(WindowError, match="ends in the future"):
        window.check_not_in_future(NOON + timedelta(minutes=59))


def test_splits_that_overlap_are_refused() -> None:
    with pytest.raises(ValidationError, match="the future leaks into the past"):
        DataSplits(
            train=builders.month(1, 6), validation=builders.month(6, 2), test=builders.month(9)
        )


def test_a_result_of_another_snapshot_vouches_for_nothing(tmp_path: Path) -> None:
    dataset = builders.dataset(ArtifactStore(tmp_path))
    other = dataset.validation.model_copy(update={"subject_sha256": "0" * 64})
    with pytest.raises(ValidationError, match="validate this snapshot"):
        ValidatedDataset(snapshot=dataset.snapshot, validation=other)


@given(st.text(min_size=1))
def test_a_category_code_is_its_crc_in_31_bits(text: str) -> None:
    code = category_code(text)
    assert code == zlib.crc32(text.encode("utf-8")) % 2**31
    assert np.int32(code) == code


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataContractError, match=r"column\(s\) dest, gust"):
        builders.COLUMNS.model_inputs(builders.frame(10).drop(columns=["dest", "gust"]))


def test_values_of_an_earlier_release_are_still_read() -> None:
    """What was added since has a default, so a state folder need not be thrown away."""
    artifact = {"uri": "artifact:tables/a/raw/b", "sha256": "0" * 64, "num_bytes": 1}
    assert (
        TableRef.model_validate({"name": "b", "artifact": artifact, "num_rows": 3}).source is None
    )
    view = {"name": "v", "watermark": "2013-01-01T00:00:00Z", "num_entities": 1}
    assert MaterializedView.model_validate(view).table is None
    names = {"files": artifact, "model": "m", "models": ["m"]}
    assert TritonRepository.model_validate({**names, "schema_of": "an earlier"}).model == "m"


@pytest.mark.parametrize("of", [BuiltVariant, ModelVariant, EvaluationReport])
def test_what_a_stage_is_handed_has_the_names_that_its_deployment_knows(of: type[Contract]) -> None:
    stored, known = (of.model_json_schema(mode=m) for m in ("serialization", "validation"))
    assert stored["properties"].keys() == known["properties"].keys()
