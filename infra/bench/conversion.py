"""Variants of the loop's model and of a sentence encoder, against ONNX Runtime in 32 bits.

Every variant is built and judged by conversion's own code. Of those that pass the gates the
best one is reported, by CPU time (user and system) of this process: loaded beside each other, one
thread each, they take turns, and what counts is the ratio within a turn. Wall time is not asked
for, so other programs on the machine disturb little.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from flows.config import read_import_config
from infra.bench.figures import Measured, at_least, at_most
from infra.bench.parts import Bench, newest_record
from tasks.contracts.base import Artifact, ModelVersionRef
from tasks.contracts.conversion import PreparedRows, SnapshotRows
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.convert import judge_variants
from tasks.conversion.decide import EAGER
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.kinds.text_embedding import IDS, padded
from tasks.conversion.measure import Timing, time_interleaved
from tasks.conversion.targets.catalog import FORMATS, with_sources
from tasks.conversion.targets.interface import (
    ConversionJob,
    LoadedModel,
    ModelInputs,
    Runtime,
    load_files,
)
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tasks.conversion.variants import build_variant
from tasks.imports.program import export_encoder
from tasks.imports.rows import prepare_corpus
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tasks.registry.connection import RegistryLocation
from tasks.registry.programs import fetch_version

Times = Mapping[str, Timing]
FLOATS = "onnx-fp32"
"""The form that others are measured against, in ONNX Runtime."""
ENCODER_FILE = PROJECT_ROOT / "feature_repo" / "models" / "sentence-encoder.yaml"
TOKENS = 32
"""Of every text whose embedding is timed; none of it is padding."""
COSINES = ((0.9999, 2.0), (0.997, 3.3))
"""Least mean cosine with the embeddings of PyTorch, and how many times faster than `FLOATS`."""


def tabular(bench: Bench) -> Measured:
    """Of the newest finished loop's model, the best variant at batch 1 and 1024."""
    settings, config = bench.settings, bench.config.conversion
    record = newest_record(settings)
    program = fetch_version(record.version, RegistryLocation.of(settings), settings.store)
    rows = SnapshotRows(dataset=record.dataset, splits=bench.config.splits)
    job = ConversionJob(program, rows, config, settings.store)
    variants = convert(job, bench)
    judged = kind_of(program).read_judged(job)
    with torch_threads_restored():
        models = loaded(job, variants)
        at = {count: timed(models, judged.timing_batch(count), bench) for count in (1, 1024)}
    names = [variant.name for variant in variants]
    one, with_one = best_of(at[1], names, EAGER)
    many, with_many = best_of(at[1024], names, FLOATS)
    return [
        at_most("tabular, batch 1, CPU to PyTorch eager", one, 0.2, with_one),
        at_most(f"tabular, batch 1024, CPU to {FLOATS}", many, 0.35, with_many),
    ]


def encoder(bench: Bench) -> Measured:
    """Of a sentence encoder, one text and 32 texts of 32 tokens."""
    store, config = ArtifactStore(bench.folder), read_import_config(ENCODER_FILE)
    assert config.encoder is not None
    assert config.corpus is not None
    imported = export_encoder(config.encoder, store)
    few_texts = {"calibration_texts": 32, "judged_texts": 64}
    corpus = config.corpus.model_copy(update=bench.size({}, few_texts))
    rows = prepare_corpus(corpus, config.encoder, store)
    of = (imported.program, rows.data.sha256)
    program = unregistered(*of, family=imported.family, signature=imported.signature)
    job = ConversionJob(program, rows, config.conversion, store)
    variants, measured = convert(job, bench), Measured()
    gaps = {each.name: each.parity_mean for each in variants if each.parity_mean is not None}
    with torch_threads_restored():
        models = loaded(job, variants)
        for count in (1, 32):
            times = timed(models, full_texts(rows, store, count), bench)
            for cosine, bound in COSINES:
                near = [name for name, gap in gaps.items() if gap <= 1 - cosine]
                share, found = best_of(times, near, FLOATS)
                name = f"encoder, batch {count}, {FLOATS} to cosine {cosine}"
                measured.append(at_least(name, 1 / share, bound, found))
    return measured


def unregistered(
    program: Artifact, snapshot_sha256: str, number: int = 1, **described: Any
) -> RegisteredProgram:
    """A program as a registry would describe it."""
    version = ModelVersionRef(
        name="bench",
        version=number,
        run_id="0" * 32,
        program_sha256=program.sha256,
        snapshot_sha256=snapshot_sha256,
    )
    return RegisteredProgram(version=version, program=program, **described)


def full_texts(rows: PreparedRows, store: ArtifactStore, count: int) -> ModelInputs:
    """So many texts of exactly `TOKENS` tokens: longer ones, cut before their last token."""
    table = pq.read_table(store.path(rows.data), columns=[IDS], filters=[("part", "==", "judged")])
    long = [np.asarray(ids) for ids in table[IDS].to_pylist() if len(ids) >= TOKENS]
    cut = [np.append(ids[: TOKENS - 1], ids[-1]) for ids in long]
    return padded([cut[number % len(cut)] for number in range(count)])


def loaded(job: ConversionJob, variants: Sequence[ModelVariant]) -> dict[str, LoadedModel]:
    """PyTorch eager and all forms, one thread each."""
    runtime, signature = Runtime(threads=1), job.program.signature
    models = {EAGER: load_pytorch(job.store.path(job.program.program), signature, runtime)}
    for variant in variants:
        assert variant.files is not None
        folder = job.store.path(variant.files)
        models[variant.name] = load_files(variant.name, folder, signature, runtime)
    return models


def convert(job: ConversionJob, bench: Bench) -> list[ModelVariant]:
    """Build every form for processors and keep those that pass the gates, however fast they are."""
    every = tuple(target.name for target in FORMATS if target.is_for("cpu"))
    names = bench.size(every, (FLOATS, "openvino-fp32"))
    quick = {"formats": names, "batch_sizes": (1,), "measurement": "quick"}
    config = ConversionConfig.model_validate({**job.config.model_dump(), **quick})
    job = replace(job, config=config)
    judged = judge_variants(job, tuple(build_all(job).values()))
    for variant in judged:
        if not variant.latencies:
            print(f"  {variant.name}: {variant.reason}")
    return [variant for variant in judged if variant.latencies]


def build_all(job: ConversionJob) -> dict[str, BuiltVariant]:
    """The variants of the job's formats and of those that they are made from, by name."""
    built: dict[str, BuiltVariant] = {}
    for target in with_sources(job.config.formats):
        sources = tuple(built[name] for name in target.made_from)
        built[target.name] = build_variant(target, job, sources)
    return built


def timed(models: Mapping[str, LoadedModel], batch: ModelInputs, bench: Bench) -> Times:
    """CPU time of all models on one batch, shown on the screen."""
    calls = {name: partial(model, batch) for name, model in models.items()}
    times = time_interleaved(calls, bench.size(25, 2), 50.0)
    described = [f"{name} {timing.cpu_ms:.3f}" for name, timing in times.items()]
    print(f"  CPU ms at batch {batch.num_rows}: {', '.join(described)}", flush=True)
    return times


def best_of(times: Times, names: list[str], other: str) -> tuple[float, str]:
    """The least share of the CPU time of `other` that one of some forms takes, and which does.

    The share is the median of the turns' ratios. Infinite where there are no forms: such a figure
    misses every bound.
    """
    if not names:
        return math.inf, "no form passes"
    floor = times[other]
    shares = {n: float(np.median(times[n].cpu_rounds_ms / floor.cpu_rounds_ms)) for n in names}
    best = min(names, key=lambda name: shares[name])
    return shares[best], f"{best} {times[best].cpu_ms:.3f} ms, {other} {floor.cpu_ms:.3f} ms"
