"""The second family: texts in, embeddings out, through the same targets and the same judge."""

from __future__ import annotations

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.contracts.base import Artifact
from tasks.contracts.conversion import PreparedRows
from tasks.conversion.convert import judge_variants
from tasks.conversion.gates.parity import score_batches
from tasks.conversion.kinds.registry import bound_of
from tasks.conversion.kinds.text_embedding import (
    IDS,
    MASK,
    TEXT_EMBEDDING,
    cosine_distances,
    edge_texts,
    embedding_distances,
    neighbour_overlaps,
    overlap_change,
    padded,
    timing_texts,
)
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.kernel.errors import ConversionError, DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.conversion.forging import passed_off
from tests.support.conversion.programs import build_one
from tests.support.conversion.text_cases import NAMES, TextCase
from tests.support.data import encoders


def _random(rows: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return dict(
        padded([rng.integers(0, 60, rng.integers(1, length + 1)) for _ in range(rows)], length)
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 24), (3, 17), (33, 5)])
@pytest.mark.parametrize(("name", "most"), [("onnx-fp32", 1e-6), ("openvino-fp32", 1e-6)])
def test_any_number_of_texts_of_any_length_embeds_as_pytorch_does(
    texts: TextCase, name: str, most: float, shape: tuple[int, int]
) -> None:
    inputs = _random(*shape)
    got = texts.answers(name, inputs)
    assert got.shape == (shape[0], 32)
    assert cosine_distances(texts.expected(inputs), got).max() < most
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_target_is_built_and_near_enough(texts: TextCase, name: str) -> None:
    assert texts.built[name].failure is None
    judged = TEXT_EMBEDDING.read_judged(texts.program, texts.rows, texts.config, texts.store)
    expected = np.concatenate([texts.expected(dict(batch)) for batch in judged.batches])
    got = np.concatenate([texts.answers(name, dict(batch)) for batch in judged.batches])
    bound = bound_of(TEXT_EMBEDDING, FORMAT[name].precision, texts.config)
    slack = 10 if FORMAT[name].precision in ("int8", "weights-int8") else 1  # 32 wide and random
    assert judged.distances(expected, got).max() < bound.max_gap * slack


def test_padding_changes_nothing(texts: TextCase) -> None:
    text = np.array([2, 9, 31, 3])
    short, long = (dict(padded([text], length)) for length in (4, 20))
    for name in ("onnx-fp32", "openvino-fp32"):
        gap = np.abs(texts.answers(name, short) - texts.answers(name, long)).max()
        assert gap < 1e-5


def test_the_file_names_both_axes_that_change(texts: TextCase) -> None:
    files = texts.built["onnx-fp32"].files
    assert files is not None
    graph = onnx.load(texts.store.path(files) / MODEL_FILE).graph
    axes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    assert axes == {
        "input_ids": ["batch", "seq"],
        "attention_mask": ["batch", "seq"],
        "embedding_unit": ["batch", 32],
    }


def test_settings_tell_which_texts_calibrated(texts: TextCase) -> None:
    settings = texts.built["openvino-int8"].settings
    assert settings["calibration_rows"] == "33"  # 24, and 3 degenerate ones in each of 3 calls
    assert settings["calibration_rows_sha256"] == texts.rows.data.sha256
    assert settings["calibration_source_words"] == "1"


@pytest.mark.slow
def test_the_judge_takes_embeddings_as_it_takes_scores(texts: TextCase) -> None:
    variants = judge_variants(
        texts.program, tuple(texts.built.values()), texts.rows, texts.config, texts.store
    )
    assert [variant.name for variant in variants] == list(NAMES)
    onnx_fp32 = variants[0]
    assert onnx_fp32.quality_name == "neighbour overlap"
    assert onnx_fp32.quality_change is not None
    assert onnx_fp32.quality_change.value == pytest.approx(0, abs=0.005)
    assert onnx_fp32.auc_change is None
    assert [at.batch_rows for at in onnx_fp32.latencies] == [1, 8]
    assert "(1 - cosine, or of its length)" in onnx_fp32.reason
    assert "neighbour overlap by" in onnx_fp32.reason


@pytest.mark.slow
def test_a_form_of_another_encoder_is_caught(texts: TextCase) -> None:
    other = encoders.registered(texts.store, "other", seed=1)
    forged = build_one("onnx-fp32", other, texts.rows, texts.config, texts.store)
    forged = passed_off(texts.store, forged, texts.built["onnx-fp32"])
    config = texts.config.model_copy(update={"formats": ("onnx-fp32",)})
    (variant,) = judge_variants(texts.program, (forged,), texts.rows, config, texts.store)
    assert not variant.accepted
    assert "an embedding differs by" in variant.reason


def test_cosines_do_not_depend_on_length_and_no_direction_is_far_away() -> None:
    one = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0], [1.0, 1.0]])
    other = np.array([[5.0, 0.0], [2.0, 0.0], [-3.0, -4.0], [0.0, 0.0]])
    np.testing.assert_allclose(cosine_distances(one, other), [0, 1, 2, 1])


def test_an_embedding_of_another_length_is_another_embedding() -> None:
    one = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    other = np.array([[1.03, 0.0], [0.0, 0.5], [0.6, -0.8]])
    np.testing.assert_allclose(embedding_distances(one, other), [0.03, 0.5, 1.28])


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
    change = overlap_change(source, variant, replicates=200, seed=0)
    assert change.value == pytest.approx(np.mean(expected) - 1)
    assert change.low < change.value < change.high < 0
    assert overlap_change(source, variant, replicates=200, seed=0) == change


def test_equal_embeddings_keep_all_neighbours_for_certain() -> None:
    source = np.random.default_rng(1).normal(size=(20, 4))
    change = overlap_change(source, source * 3, replicates=50, seed=0)
    assert (change.value, change.low, change.high) == (0, 0, 0)


def test_too_few_texts_have_no_neighbours() -> None:
    with pytest.raises(DataContractError, match="5 texts have no 5 neighbours each"):
        neighbour_overlaps(np.eye(5), np.eye(5))


def test_edge_texts_hold_one_token_and_the_longest_text_and_much_padding() -> None:
    batches = edge_texts([np.array([2, 7, 3]), np.array([2, 9, 9, 3])], longest=24, seed=0)
    shapes = {batch[IDS].shape for batch in batches}
    assert {(1, 1), (1, 2), (1, 24), (2, 24)} <= shapes
    assert all(width <= 24 for _, width in shapes)
    fullness = [batch[MASK].mean(axis=1).min() for batch in batches]
    assert min(fullness) < 0.1
    assert all((batch[MASK].sum(axis=1) > 0).all() for batch in batches)


def test_every_calibrating_call_holds_degenerate_texts_too(texts: TextCase) -> None:
    calls = TEXT_EMBEDDING.read_calibration(texts.program, texts.rows, texts.config, texts.store)
    assert [call.num_rows for call in calls] == [11, 11, 11]
    for call in calls:
        empty, short, repeated = call[IDS][-3:]
        assert empty[:2].tolist() == [2, 3]
        assert call[MASK][-3:].sum(axis=1).tolist() == [2, 3, 24]
        assert short[[0, 2]].tolist() == [2, 3]
        assert len(set(repeated.tolist())) == 1


def test_texts_to_time_are_of_median_length_or_a_seeded_draw() -> None:
    ten = [np.arange(1, length + 1) for length in range(1, 11)]
    assert timing_texts(ten, 1, seed=0)[IDS].shape == (1, 6)
    again = [timing_texts(ten, 32, seed=3)[IDS] for _ in range(2)]
    assert again[0].shape[0] == 32
    np.testing.assert_array_equal(*again)


def test_texts_longer_than_the_program_takes_are_refused(texts: TextCase) -> None:
    signature = texts.program.signature.model_copy(update={"largest": {"batch": 64, "seq": 8}})
    program = texts.program.model_copy(update={"signature": signature})
    with pytest.raises(DataContractError, match=r"than the program takes \(8\)"):
        TEXT_EMBEDDING.read_judged(program, texts.rows, texts.config, texts.store)


def test_few_texts_cannot_judge(texts: TextCase) -> None:
    rows = encoders.prepared(texts.store, num_judged=7)
    with pytest.raises(DataContractError, match="7 texts to judge on, expected at least 8"):
        TEXT_EMBEDDING.read_judged(texts.program, rows, texts.config, texts.store)


def test_a_corpus_without_a_calibration_part_cannot_calibrate(texts: TextCase) -> None:
    rows = encoders.prepared(texts.store, num_judged=64, num_calibration=1)
    data = _table(texts.store, {"part": ["judged"], "input_ids": [[2, 3]]})
    emptied = rows.model_copy(update={"data": data})
    with pytest.raises(ConversionError, match="nothing to calibrate INT8 on"):
        TEXT_EMBEDDING.read_calibration(texts.program, emptied, texts.config, texts.store)


def test_rows_without_token_ids_are_refused(texts: TextCase) -> None:
    data = _table(texts.store, {"part": ["judged"], "words": ["a"]})
    rows = texts.rows.model_copy(update={"data": data})
    with pytest.raises(DataContractError, match="have the columns part, words, expected 'input_id"):
        TEXT_EMBEDDING.read_judged(texts.program, rows, texts.config, texts.store)


def _table(store: ArtifactStore, columns: dict[str, list[object]]) -> Artifact:
    def build(folder: StagedFolder) -> PreparedRows:
        table = pa.table(columns)
        pq.write_table(table, folder.path / "texts.parquet")
        return PreparedRows(
            data=folder.artifact("texts.parquet"),
            num_calibration=1,
            num_judged=1,
            made_from={},
        )

    return store.build_once("corpora", "-".join(columns), PreparedRows, build).data


def test_a_model_that_answers_with_another_width_is_found(texts: TextCase) -> None:
    judged = TEXT_EMBEDDING.read_judged(texts.program, texts.rows, texts.config, texts.store)
    widths = iter(range(1, 100))
    with pytest.raises(ConversionError, match="the same after the first axis"):
        score_batches(
            lambda inputs: np.zeros((inputs.num_rows, next(widths)), np.float32), judged.batches
        )
