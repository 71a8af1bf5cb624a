"""Programs that take token ids of texts and give one embedding of length 1 a text."""

from functools import partial

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.conversion import PreparedRows
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import QualityBound
from tasks.conversion.kinds.interface import JudgedRows, ModelKind, mean_interval
from tasks.conversion.targets.interface import (
    SEED,
    Batches,
    ConversionJob,
    FloatArray,
    ModelInputs,
    Scores,
)
from tasks.kernel.errors import ConfigurationError, ConversionError, DataContractError

OVERLAP_NAME = "neighbour overlap"
NEIGHBOURS = 5
IDS, MASK = "input_ids", "attention_mask"
SEQUENCE_AXIS = "seq"
SCORED_TEXTS = 32  # a call
CALIBRATION_TEXTS = 8  # a call, so that a range is not that of a single text
REPEATS = 40
EDGE_SHAPES = ((1, 1), (1, 2), (2, 7), (7, 33), (32, 16))
FEWEST_JUDGED = 8
Tokens = list[NDArray[np.int64]]

UNIT = " (1 - cosine, or of its length)"
BOUNDS = {
    "fp32": QualityBound(max_gap=1e-5, mean_gap=1e-6, quality_drop=0.005),
    "fp16": QualityBound(max_gap=1e-3, mean_gap=1e-4, quality_drop=0.02),
    "bf16": QualityBound(max_gap=1e-3, mean_gap=1e-4, quality_drop=0.02),
    "int8": QualityBound(max_gap=0.02, mean_gap=0.003, edge_gap=0.1, quality_drop=0.08),
}


def embedding_distances(reference: Scores, converted: Scores) -> NDArray[np.float64]:
    """1 - cosine of two embeddings of a text, or the change of its length where that is more.

    1 where one of them has no direction. Who multiplies embeddings takes them to be of length 1,
    and a cosine does not see that they are not: a variant that forgets to normalise has the
    direction of its source.
    """
    (one, length), (other, length_now) = _directions(reference), _directions(converted)
    cosines = np.einsum("rd,rd->r", one, other)
    lengths = np.abs(length_now - length) / np.where(length > 0, length, 1.0)
    distances: NDArray[np.float64] = np.maximum(np.maximum(1 - cosines, 0.0), lengths)
    return distances


def _directions(embeddings: FloatArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Embeddings at length 1, 0 where there is none, and the lengths that they had."""
    vectors = embeddings.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1)
    return vectors / np.where(lengths > 0, lengths, 1.0)[:, None], lengths


def overlap_change(source: FloatArray, variant: FloatArray) -> Metric:
    """Share of the five nearest other texts that stay the same, minus 1, with its 95 % interval.

    Args:
        source: embeddings of the texts, shape (texts, width).
        variant: those of the converted program, same texts in the same order.

    Returns:
        0 where every text keeps its neighbours; the overlap is 1 more.

    Raises:
        DataContractError: there are too few texts to have neighbours.
    """
    overlaps = neighbour_overlaps(source, variant) - 1.0
    return mean_interval(overlaps, num_blocks=len(overlaps))


def neighbour_overlaps(source: FloatArray, variant: FloatArray) -> NDArray[np.float64]:
    """For each text the share of its nearest others that both models agree on."""
    if len(source) <= NEIGHBOURS:
        raise DataContractError(
            f"{len(source)} texts have no {NEIGHBOURS} neighbours each; judge on more texts"
        )
    pairs = zip(_nearest(source), _nearest(variant), strict=True)
    return np.array([len(np.intersect1d(a, b)) / NEIGHBOURS for a, b in pairs])


def _nearest(embeddings: FloatArray) -> NDArray[np.int64]:
    vectors, _ = _directions(embeddings)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return np.argpartition(-likeness, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]


def padded(texts: Tokens, length: int | None = None) -> ModelInputs:
    """Texts beside each other, filled up with zeros that the mask hides.

    Args:
        texts: token ids of each.
        length: of every row; None for that of the longest text.
    """
    width = length or max(len(text) for text in texts)
    ids = np.zeros((len(texts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return ModelInputs({IDS: ids, MASK: mask})


def edge_texts(texts: Tokens, longest: int) -> Batches:
    """Texts that a corpus rarely holds: one token, random ones, far more padding than text.

    Args:
        texts: ordinary ones, whose tokens are mixed.
        longest: most tokens that the program takes; such a text is among them.
    """
    rng = np.random.default_rng(SEED)
    tokens = np.unique(np.concatenate(texts))
    batches = []
    for rows, width in (*EDGE_SHAPES, (1, longest), (2, longest)):
        width = min(width, longest)
        lengths = rng.integers(1, width + 1, rows)
        lengths[0] = width
        batches.append(padded([rng.choice(tokens, count) for count in lengths], width))
    batches.append(padded([tokens[:1], np.repeat(tokens[-1:], longest)]))
    return tuple(batches)


def timing_texts(texts: Tokens, rows: int) -> ModelInputs:
    """So many texts of a typical call: one of median length alone, else a seeded draw."""
    by_length = sorted(texts, key=len)
    if rows == 1:
        return padded([by_length[len(texts) // 2]])
    chosen = np.random.default_rng(SEED).choice(len(texts), rows, replace=rows > len(texts))
    return padded([texts[position] for position in chosen])


def _read_calibration(job: ConversionJob) -> Batches:
    texts = _read(job, "calibration")
    if not texts:
        raise ConversionError(
            "there is nothing to calibrate INT8 on: the prepared rows have no calibration part"
        )
    rng = np.random.default_rng(SEED)
    count = min(job.config.calibration_rows, len(texts))
    chosen = [texts[p] for p in np.sort(rng.choice(len(texts), count, replace=False))]
    return tuple(
        padded([*part, *_degenerate(part, _longest(job.program, texts), rng)])
        for start in range(0, count, CALIBRATION_TEXTS)
        if (part := chosen[start : start + CALIBRATION_TEXTS])
    )


def _degenerate(texts: Tokens, longest: int, rng: np.random.Generator) -> Tokens:
    """An empty text, one of one word, and one word over and over.

    In each calibrating call, because a quantiser averages the ranges of calls. All-MiniLM-L6 in
    INT8 then kept 1 - cosine of an empty text to 0.02 instead of 0.1, of a repeated word to 0.03
    instead of 0.12, and that of ordinary texts at 0.0017 on average instead of 0.0018.
    """
    first, last = texts[0][0], texts[0][-1]
    words = rng.choice(np.concatenate(texts), 2)
    return [
        np.array([first, last])[:longest],
        np.array([first, words[0], last])[:longest],
        np.repeat(words[1], min(REPEATS, longest)),
    ]


def _read_judged(job: ConversionJob) -> JudgedRows:
    texts = sorted(_read(job, "judged"), key=len)  # little padding: faster
    if len(texts) < FEWEST_JUDGED:
        raise DataContractError(
            f"the prepared rows have {len(texts)} texts to judge on, expected at least "
            f"{FEWEST_JUDGED} with neighbours; prepare more"
        )
    return JudgedRows(
        batches=tuple(
            padded(texts[start : start + SCORED_TEXTS])
            for start in range(0, len(texts), SCORED_TEXTS)
        ),
        edges=edge_texts(texts, _longest(job.program, texts)),
        distances=embedding_distances,
        change=overlap_change,
        timing_batch=partial(timing_texts, texts),
        metric=OVERLAP_NAME,
        unit=UNIT,
    )


def _longest(program: RegisteredProgram, texts: Tokens) -> int:
    return program.signature.largest.get(SEQUENCE_AXIS, max(len(text) for text in texts))


def _read(job: ConversionJob, part: str) -> Tokens:
    rows, signature = job.rows, job.program.signature
    if not isinstance(rows, PreparedRows):
        raise ConfigurationError(
            "a program that embeds texts is converted with prepared token ids, and got rows of a "
            f"{rows.kind}; hand it what the preparation of its corpus returned"
        )
    names = [spec.name for spec in signature.inputs]
    if names != [IDS, MASK]:
        raise DataContractError(
            f"the program takes {names}, a program of the kind text-embedding takes "
            f"{[IDS, MASK]}; export it with these argument names"
        )
    path = job.store.path(rows.data)
    if IDS not in (columns := pq.read_schema(path).names):
        raise DataContractError(
            f"the prepared rows have the columns {', '.join(columns)}, expected {IDS!r} with the "
            "token ids of each text; prepare them for this kind"
        )
    listed = pq.read_table(path, columns=[IDS], filters=[("part", "==", part)])[IDS].to_pylist()
    if nulls := sum(ids is None or None in ids for ids in listed):
        raise DataContractError(
            f"{nulls} of {len(listed)} texts of the part {part!r} are null or hold a null, "
            "expected token ids alone. Prepare the corpus again"
        )
    texts = [np.asarray(ids, dtype=np.int64) for ids in listed]
    longest = signature.largest.get(SEQUENCE_AXIS)
    long = [len(text) for text in texts if not text.size or (longest and len(text) > longest)]
    if long:
        raise DataContractError(
            f"{len(long)} texts of the part {part!r} have no token or more than the program takes "
            f"({longest}): {long[:5]} tokens. Prepare the corpus for this program"
        )
    return texts


TEXT_EMBEDDING = ModelKind(
    name="text-embedding",
    bounds=BOUNDS,
    read_calibration=_read_calibration,
    read_judged=_read_judged,
    is_transformer=True,
)
