"""Rows of any program, and what its answers are worth, without anyone saying what it means."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.contracts.base import Artifact
from tasks.contracts.conversion import PreparedRows, Signature
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.interface import bound_of
from tasks.conversion.kinds.tensors import TENSORS, read_inputs, spread_distances, spread_of
from tasks.conversion.kinds.text_embedding import (
    IDS,
    MASK,
    TEXT_EMBEDDING,
    edge_texts,
    embedding_distances,
    neighbour_overlaps,
    overlap_change,
    padded,
)
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.interface import ConversionJob
from tasks.kernel.errors import ConfigurationError, ConversionError, DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.conversion.cases import NAMES, TextCase
from tests.support.data.builders import version_ref

CONFIG = ConversionConfig(batch_sizes=(1, 4))


def signature(*shape: str | int, output: tuple[int, ...] = (), **more: Any) -> Signature:
    return Signature.model_validate(
        {
            "inputs": [{"name": "x", "dtype": "float32", "shape": ("batch", *shape), **more}],
            "output": {"name": "y", "dtype": "float32", "shape": ("batch", *output)},
            "largest": {"batch": 16},
        }
    )


def job(store: ArtifactStore, rows: PreparedRows, output: tuple[int, ...] = ()) -> ConversionJob:
    file = Artifact(uri="programs/theirs", sha256="1" * 64, num_bytes=1)
    fields = {"family": "tensors", "signature": signature(output=output)}
    program = RegisteredProgram(version=version_ref(file.sha256), program=file, **fields)
    return ConversionJob(program, rows, CONFIG, store)


def prepared(store: ArtifactStore, **columns: Any) -> PreparedRows:
    parts = ["calibration", "judged"] * (len(next(iter(columns.values()))) // 2)

    def build(folder: StagedFolder) -> PreparedRows:
        pq.write_table(pa.table({"part": parts, **columns}), folder.path / "rows.parquet")
        data = folder.artifact("rows.parquet")
        return PreparedRows(data=data, num_calibration=1, num_judged=1, made_from={})

    return store.build_once("corpora", "rows", PreparedRows, build)


def test_lists_are_nested_as_the_axes_are_or_flat_where_all_axes_are_fixed() -> None:
    values = np.arange(24).reshape(2, 3, 4)
    nested = pa.table({"x": values.tolist()})
    flat = pa.table({"x": values.reshape(2, 12).tolist()})
    for table in (nested, flat):
        np.testing.assert_array_equal(read_inputs(table, signature(3, 4))["x"], values)
    np.testing.assert_array_equal(read_inputs(nested, signature("high", "wide"))["x"], values)
    assert read_inputs(nested, signature(3, 4))["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("column", "taken", "sentence"),
    [
        ({"z": [1.0]}, signature(), r"have the columns z, expected 'x'"),
        ({"x": [[1.0], [1.0, 2.0]]}, signature(2), "have 2 different lengths"),
        ({"x": [[1.0], None]}, signature(1), "or are absent in some rows"),
        ({"x": [1.0, None]}, signature(), "holds double with 1 nulls"),
        ({"x": ["a"]}, signature(), "holds string"),
        ({"x": [[1.0, 2.0]]}, signature(3), r"\[2\] values of 'x' each, the program takes \[3\]"),
        ({"x": [[1.0, 2.0]]}, signature(2, 2), r"holds \[2\] numbers a row"),
        ({"x": [1.0, 1.5]}, signature(dtype="int64"), r"hold 1\.5, and the program takes whole"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_a_sentence(
    column: dict[str, Any], taken: Signature, sentence: str
) -> None:
    with pytest.raises(DataContractError, match=sentence):
        read_inputs(pa.table(column), taken)


def test_each_answer_is_compared_in_units_of_its_own_spread() -> None:
    answers = np.array([[0.0, 1000.0], [2.0, 1200.0]])
    unit = spread_of(answers, apart=True)
    np.testing.assert_allclose(spread_distances(answers[:1], answers[:1] + 1, unit), [1])
    gaps = spread_distances(answers, answers + np.array([[0, 1], [5, 0]]))
    np.testing.assert_allclose(gaps, [0.01, 5])  # 100 hides no 5 beside it
    np.testing.assert_allclose(spread_distances(np.ones((2, 1)), np.zeros((2, 1))), [1, 1])


@pytest.mark.parametrize(
    ("labels", "output", "metric"),
    [
        (None, (), "agreement"),
        (None, (3,), "agreement"),
        ([0, 1] * 10 + [1, 0] * 10, (), "AUC"),
        ([0.5, 1.5] * 20, (1,), "R²"),
        ([0, 1, 2, 1] * 10, (3,), "accuracy"),
    ],
)
def test_the_metric_follows_from_labels_and_output(
    store: ArtifactStore, labels: list[float] | None, output: tuple[int, ...], metric: str
) -> None:
    x = np.random.default_rng(0).normal(size=40)
    if labels == [0.5, 1.5] * 20:
        labels = list(x)
    rows = prepared(store, x=x, **({} if labels is None else {"label": labels}))
    judged = TENSORS.read_judged(job(store, rows, output=output))
    assert judged.metric == metric
    scores = np.random.default_rng(1).normal(size=(20, *output)).astype(np.float32)
    assert judged.change(scores, scores).value == 0
    other = judged.change(scores, np.roll(scores, 1, axis=0))
    assert other.low <= other.value <= other.high
    assert other.low < other.high


def test_what_cannot_judge_or_calibrate_is_refused_with_a_sentence(store: ArtifactStore) -> None:
    few = prepared(store, x=[1.0, 2.0])
    with pytest.raises(DataContractError, match="have 1 rows to judge on, expected at least 8"):
        TENSORS.read_judged(job(store, few))
    many = CONFIG.model_copy(update={"batch_sizes": (1, 64)})
    rows = ArtifactStore(store.root / "other")
    with pytest.raises(ConfigurationError, match="64 rows a call, the program takes 16 at most"):
        TENSORS.read_judged(replace(job(rows, prepared(rows, x=[1.0] * 20)), config=many))
    third = ArtifactStore(store.root / "third")
    strange = prepared(third, z=[1.0] * 20)
    with pytest.raises(ConversionError, match=r"nothing to calibrate INT8 on.*expected 'x'"):
        TENSORS.read_calibration(job(third, strange))


def test_calibration_takes_its_own_part_in_calls_that_the_program_takes(
    store: ArtifactStore,
) -> None:
    calls = TENSORS.read_calibration(job(store, prepared(store, x=np.arange(100.0))))
    assert [call.num_rows for call in calls] == [16, 16, 16, 2]
    assert set(np.concatenate([call["x"] for call in calls]) % 2) == {0.0}


def _random(rows: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return dict(
        padded([rng.integers(0, 60, rng.integers(1, length + 1)) for _ in range(rows)], length)
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 24), (3, 17), (33, 5)])
@pytest.mark.parametrize("name", ["onnx-fp32", "openvino-fp32"])
def test_any_number_of_texts_of_any_length_embeds_as_pytorch_does(
    texts: TextCase, name: str, shape: tuple[int, int]
) -> None:
    inputs = _random(*shape)
    got = texts.answers(name, inputs)
    assert got.shape == (shape[0], 32)
    assert embedding_distances(texts.expected(inputs), got).max() < 1e-5
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_target_is_built_and_near_enough(texts: TextCase, name: str) -> None:
    assert texts.built[name].failure is None
    judged = TEXT_EMBEDDING.read_judged(texts)
    expected = np.concatenate([texts.expected(dict(batch)) for batch in judged.batches])
    got = np.concatenate([texts.answers(name, dict(batch)) for batch in judged.batches])
    bound = bound_of(TEXT_EMBEDDING, FORMAT[name].precision, texts.config)
    slack = 10 if FORMAT[name].precision == "int8" else 1  # 32 wide and random
    assert judged.distances(expected, got).max() < bound.max_gap * slack


def test_another_direction_or_length_is_another_embedding() -> None:
    one = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, 1.0], [0.0, 1.0]])
    other = np.array([[1.03, 0.0], [0.0, 0.5], [0.6, -0.8], [1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(embedding_distances(one, other), [0.03, 0.5, 1.28, 1, 1])


def test_neighbours_that_stay_are_counted_by_hand() -> None:
    rng = np.random.default_rng(0)
    source = rng.normal(size=(30, 8))
    variant = source + rng.normal(size=source.shape) * 0.5
    expected = []
    for text in range(30):
        nearest = []
        for model in (source, variant):
            unit = model / np.linalg.norm(model, axis=1, keepdims=True)
            order = [other for other in np.argsort(-(unit @ unit[text])) if other != text]
            nearest.append(set(order[:5]))
        expected.append(len(nearest[0] & nearest[1]) / 5)
    np.testing.assert_allclose(neighbour_overlaps(source, variant), expected)
    change = overlap_change(source, variant)
    assert change.value == pytest.approx(np.mean(expected) - 1)
    assert change.low < change.value < change.high < 0
    assert overlap_change(source, variant) == change


def test_edge_texts_hold_one_token_and_the_longest_text_and_much_padding() -> None:
    batches = edge_texts([np.array([2, 7, 3]), np.array([2, 9, 9, 3])], longest=24)
    shapes = {batch[IDS].shape for batch in batches}
    assert {(1, 1), (1, 2), (1, 24), (2, 24)} <= shapes
    assert all(width <= 24 for _, width in shapes)
    assert min([batch[MASK].mean(axis=1).min() for batch in batches]) < 0.1
    assert all((batch[MASK].sum(axis=1) > 0).all() for batch in batches)


def test_a_large_offset_of_the_answers_hides_no_error(store: ArtifactStore) -> None:
    judged = TENSORS.read_judged(job(store, prepared(store, x=np.arange(40.0))))
    near = np.random.default_rng(0).integers(0, 4, 20).astype(np.float32)
    far = near + np.float32(1e6)
    assert judged.change(far, np.roll(far, 1)) == judged.change(near, np.roll(near, 1))
