"""What the page says of a conversion: what serves which goal and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.kernel.settings import ArtifactStore
from tasks.reporting import conversion
from tasks.reporting.figures import Pictures
from tasks.reporting.quantities import MISSING
from tests.support.reporting.pages import parsed, rendered
from tests.support.reporting.run_records import hostile_record, run_record


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def test_every_goal_is_listed_also_one_that_nothing_serves(store: ArtifactStore) -> None:
    found = {choice.goal: choice for choice in conversion.choices(run_record(store))}
    assert {goal: choice.variant for goal, choice in found.items()} == {
        "one-row": "onnx-fp32",
        "bulk": "openvino-fp32",
        "edge": "no variant",
    }
    assert found["edge"].rule == "Best at edge."
    assert found["bulk"].hardware_class == "cpu"


def test_costs_are_those_of_variants_that_were_timed(store: ArtifactStore) -> None:
    found = conversion.costs(run_record(store))
    assert [cost.variant for cost in found] == ["onnx-fp32", "openvino-fp32", "openvino-int8"]
    assert found[0].rows_per_s == "240,000"
    assert found[0].price.endswith(" USD")
    assert found[0].core_ms[0] == "batch 1: 0.0404 ms"
    assert found[2].rows_per_s == MISSING


def test_the_page_shows_goals_and_costs(store: ArtifactStore) -> None:
    _, page = rendered(run_record(store), store)
    for words in (
        "What serves which goal", "Best at bulk.", "no variant", "What each variant takes",
        "core seconds", "0.04 USD an hour",
    ):  # fmt: skip
        assert words.lower() in page.words.lower(), words


def test_there_is_a_picture_for_each_batch_size_and_for_the_price(store: ArtifactStore) -> None:
    captions = [caption for caption, _ in Pictures(run_record(store)).trades]
    assert captions == [
        "Latency of one row against AUC change: left is cheaper, up is better",
        "Latency of 32 rows against AUC change: left is cheaper, up is better",
        "Latency of 1,024 rows against AUC change: left is cheaper, up is better",
        "Price against AUC change: left is cheaper, up is better",
    ]
    for _, drawing in Pictures(hostile_record(store)).trades:
        parsed(drawing)
