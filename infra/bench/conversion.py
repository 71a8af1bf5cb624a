"""What conversion makes of two models: CPU time of its variants against PyTorch and ONNX Runtime.

    python -m infra.bench.conversion [STATE_FOLDER]

The tabular model is that of the newest finished loop, the encoder that of `ENCODER_FILE`. Every
form for processors is built and judged by conversion's own code. Of those that pass the gates the
best one is told, by CPU time (user and system) of this process: loaded beside each other, one
thread each, they take turns, and what counts is the ratio within a turn. Wall time is not asked
for, so other programs on the machine disturb little.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from flows.config import read_pipeline_config
from flows.import_config import read_import_config
from infra.bench.cpu_time import CpuTimes, cpu_times
from infra.bench.figures import Figure, at_least, at_most
from infra.bench.finished import newest_record
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ConversionRows, PreparedRows, SnapshotRows
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.families.registry import family_of
from tasks.conversion.families.text_embedding import IDS, padded
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.judge import judge_variants
from tasks.conversion.races import EAGER
from tasks.conversion.runtimes import LoadedModel, load_pytorch, torch_threads_restored
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.registry import TARGET, TARGETS, with_sources
from tasks.conversion.variants import build_variant
from tasks.imports.corpus import prepare_corpus
from tasks.imports.program import export_encoder
from tasks.registry.connection import RegistryLocation
from tasks.registry.programs import fetch_version
from tasks.settings import PROJECT_ROOT, ArtifactStore, Settings

ENCODER_FILE = PROJECT_ROOT / "feature_repo" / "models" / "sentence-encoder.yaml"
FLOATS = "onnx-fp32"
"""The form that others are measured against, in ONNX Runtime."""
TOKENS = 32
"""Of every text whose embedding is timed; none of it is padding."""
COSINES = ((0.9999, 2.0), (0.997, 3.3))
"""Least mean cosine with the embeddings of PyTorch, and how many times faster than `FLOATS`."""


@dataclass(frozen=True)
class Converted:
    """A model, and its forms that pass the gates."""

    program: RegisteredProgram
    variants: tuple[ModelVariant, ...]
    store: ArtifactStore

    def within(self, mean_gap: float) -> list[str]:
        """Names of the forms whose answers differ from PyTorch's by no more than this."""
        gaps = {variant.name: variant.parity_mean for variant in self.variants}
        return [name for name, gap in gaps.items() if gap is not None and gap <= mean_gap]

    def loaded(self) -> dict[str, LoadedModel]:
        """PyTorch eager and all forms, one thread each."""
        runtime, signature = Runtime(threads=1), self.program.signature
        models = {EAGER: load_pytorch(self.store.path(self.program.program), signature, runtime)}
        for variant in self.variants:
            assert variant.files is not None
            folder = self.store.path(variant.files)
            models[variant.name] = TARGET[variant.name].load(folder, signature, runtime)
        return models


def convert(
    program: RegisteredProgram, rows: ConversionRows, config: ConversionConfig, store: ArtifactStore
) -> Converted:
    """Build every form for processors and keep those that pass the gates, however fast they are."""
    names = tuple(target.name for target in TARGETS if target.is_for("cpu"))
    quick = {"targets": names, "batch_sizes": (1,), "timing_rounds": 6, "round_ms": 1.0}
    config = ConversionConfig.model_validate({**config.model_dump(), **quick})
    built: dict[str, BuiltVariant] = {}
    for target in with_sources(config.targets):
        sources = tuple(built[name] for name in target.made_from)
        built[target.name] = build_variant(target, program, sources, rows, config, store)
    judged = judge_variants(program, tuple(built.values()), rows, config, store)
    for variant in judged:
        if not variant.latencies:
            print(f"  {variant.name}: {variant.reason}")
    return Converted(program, tuple(v for v in judged if v.latencies), store)


def tabular_figures(settings: Settings) -> list[Figure]:
    """The model of the newest finished loop, at batch 1 and 1024."""
    record = newest_record(settings)
    config = read_pipeline_config(settings.feature_repo)
    program = fetch_version(record.version, RegistryLocation.of(settings), settings.store)
    rows = SnapshotRows(dataset=record.dataset, splits=config.splits)
    converted = convert(program, rows, config.conversion, settings.store)
    judged = family_of(program).read_judged(program, rows, config.conversion, settings.store)
    with torch_threads_restored():
        models = converted.loaded()
        at = {count: _timed(models, judged.timing_batch(count)) for count in (1, 1024)}
    names = [variant.name for variant in converted.variants]
    one, told_one = best_of(at[1], names, EAGER)
    many, told_many = best_of(at[1024], names, FLOATS)
    return [
        at_most("tabular, batch 1, CPU to PyTorch eager", one, 0.2, told_one),
        at_most(f"tabular, batch 1024, CPU to {FLOATS}", many, 0.35, told_many),
    ]


def sentence_encoder(
    store: ArtifactStore,
) -> tuple[RegisteredProgram, PreparedRows, ConversionConfig]:
    """The real encoder, the texts that calibrate and judge it, and how it is converted."""
    config = read_import_config(ENCODER_FILE)
    assert config.encoder is not None
    assert config.corpus is not None
    imported = export_encoder(config.encoder, store)
    rows = prepare_corpus(config.corpus, config.encoder, store)
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


def encoder_figures(folder: Path) -> list[Figure]:
    """The real encoder, one text and 32 texts of 32 tokens; everything is written to `folder`."""
    store = ArtifactStore(folder)
    program, rows, config = sentence_encoder(store)
    converted = convert(program, rows, config, store)
    figures = []
    with torch_threads_restored():
        models = converted.loaded()
        for count in (1, 32):
            times = _timed(models, full_texts(rows, store, count))
            for cosine, bound in COSINES:
                share, told = best_of(times, converted.within(1 - cosine), FLOATS)
                name = f"encoder, batch {count}, {FLOATS} to cosine {cosine}"
                figures.append(at_least(name, 1 / share, bound, told))
    return figures


def full_texts(rows: PreparedRows, store: ArtifactStore, count: int) -> ModelInputs:
    """So many texts of exactly `TOKENS` tokens: longer ones, cut before their last token."""
    table = pq.read_table(store.path(rows.data), columns=[IDS], filters=[("part", "==", "judged")])
    long = [np.asarray(ids) for ids in table[IDS].to_pylist() if len(ids) >= TOKENS]
    cut = [np.append(ids[: TOKENS - 1], ids[-1]) for ids in long]
    return padded([cut[number % len(cut)] for number in range(count)])


def _timed(models: Mapping[str, LoadedModel], batch: ModelInputs) -> CpuTimes:
    """CPU time of all models on one batch, told on the screen."""
    times = cpu_times({name: partial(model, batch) for name, model in models.items()})
    told = [f"{name} {times.milliseconds(name):.3f}" for name in models]
    print(f"  CPU ms at batch {batch.num_rows}: {', '.join(told)}", flush=True)
    return times


def best_of(times: CpuTimes, names: list[str], other: str) -> tuple[float, str]:
    """The least share of the CPU time of `other` that one of some forms takes, and which does.

    Infinite where there are none: such a figure misses every bound.
    """
    if not names:
        return math.inf, "no form passes"
    best = min(names, key=lambda name: times.share(name, other))
    told = f"{best} {times.milliseconds(best):.3f} ms, {other} {times.milliseconds(other):.3f} ms"
    return times.share(best, other), told


def conversion_figures(settings: Settings, folder: Path) -> list[Figure]:
    """Both models; what is built is written to `folder`, or to the state folder's own store."""
    return [*tabular_figures(settings), *encoder_figures(folder)]


def main(arguments: list[str]) -> int:
    """Print the figures; 1 where one misses its bound."""
    if arguments:
        os.environ["FALAJ_HOME"] = arguments[0]
    with tempfile.TemporaryDirectory(prefix="falaj-bench-") as scratch:
        figures = conversion_figures(Settings.from_environment(), Path(scratch))
    for figure in figures:
        print(figure.line())
    return int(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
