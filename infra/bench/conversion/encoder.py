"""Variants of a sentence encoder, against ONNX Runtime in 32 bits."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from flows.config import read_import_config
from infra.bench.conversion.variants import FLOATS, best_of, convert, timed
from infra.bench.figures import Measured, at_least
from infra.bench.parts import Bench
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import PreparedRows
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.text_embedding import IDS, padded
from tasks.conversion.targets.interface import ModelInputs
from tasks.conversion.targets.pytorch import torch_threads_restored
from tasks.imports.program import export_encoder
from tasks.imports.rows import prepare_corpus
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore

ENCODER_FILE = PROJECT_ROOT / "feature_repo" / "models" / "sentence-encoder.yaml"
TOKENS = 32
"""Of every text whose embedding is timed; none of it is padding."""
COSINES = ((0.9999, 2.0), (0.997, 3.3))
"""Least mean cosine with the embeddings of PyTorch, and how many times faster than `FLOATS`."""
FEW_TEXTS = {"calibration_texts": 32, "judged_texts": 64}


def figures(bench: Bench) -> Measured:
    """One text and 32 texts of 32 tokens."""
    store = ArtifactStore(bench.folder)
    program, rows, config = sentence_encoder(store, bench)
    converted = convert(program, rows, config, store, bench)
    measured: Measured = []
    with torch_threads_restored():
        models = converted.loaded()
        for count in (1, 32):
            times = timed(models, full_texts(rows, store, count), bench)
            for cosine, bound in COSINES:
                share, found = best_of(times, converted.within(1 - cosine), FLOATS)
                name = f"encoder, batch {count}, {FLOATS} to cosine {cosine}"
                measured.append(at_least(name, 1 / share, bound, found))
    return measured


def sentence_encoder(
    store: ArtifactStore, bench: Bench
) -> tuple[RegisteredProgram, PreparedRows, ConversionConfig]:
    """The real encoder, the texts that calibrate and judge it, and how it is converted."""
    config = read_import_config(ENCODER_FILE)
    assert config.encoder is not None
    assert config.corpus is not None
    imported = export_encoder(config.encoder, store)
    corpus = config.corpus.model_copy(update=bench.size({}, FEW_TEXTS))
    rows = prepare_corpus(corpus, config.encoder, store)
    version = ModelVersionRef(
        name=config.registry.model_name,
        version=1,
        run_id="0" * 32,
        program_sha256=imported.program.sha256,
        snapshot_sha256=rows.data.sha256,
    )
    program = RegisteredProgram(
        version=version,
        program=imported.program,
        family=imported.family,
        signature=imported.signature,
    )
    return program, rows, config.conversion


def full_texts(rows: PreparedRows, store: ArtifactStore, count: int) -> ModelInputs:
    """So many texts of exactly `TOKENS` tokens: longer ones, cut before their last token."""
    table = pq.read_table(store.path(rows.data), columns=[IDS], filters=[("part", "==", "judged")])
    long = [np.asarray(ids) for ids in table[IDS].to_pylist() if len(ids) >= TOKENS]
    cut = [np.append(ids[: TOKENS - 1], ids[-1]) for ids in long]
    return padded([cut[number % len(cut)] for number in range(count)])
