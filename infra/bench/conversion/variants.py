"""Build the variants of a model for processors, and compare the CPU time of those that pass.

Every variant is built and judged by conversion's own code. Of those that pass the gates the
best one is reported, by CPU time (user and system) of this process: loaded beside each other, one
thread each, they take turns, and what counts is the ratio within a turn. Wall time is not asked
for, so other programs on the machine disturb little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from infra.bench.parts import Bench
from tasks.contracts.conversion import ConversionRows
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.convert import judge_variants
from tasks.conversion.decide import EAGER
from tasks.conversion.measure import Timing, time_interleaved
from tasks.conversion.targets.catalog import FORMATS, with_sources
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime, load_files
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.variants import build_variant
from tasks.kernel.settings import ArtifactStore

NUM_TURNS = 25
TURN_MS = 50.0
Times = Mapping[str, Timing]
FLOATS = "onnx-fp32"
"""The form that others are measured against, in ONNX Runtime."""
SMALL = (FLOATS, "openvino-fp32")


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
            models[variant.name] = load_files(variant.name, folder, signature, runtime)
        return models


def convert(
    program: RegisteredProgram,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
    bench: Bench,
) -> Converted:
    """Build every form for processors and keep those that pass the gates, however fast they are."""
    every = tuple(target.name for target in FORMATS if target.is_for("cpu"))
    names = bench.size(every, SMALL)
    quick = {"formats": names, "batch_sizes": (1,), "measurement": "quick"}
    config = ConversionConfig.model_validate({**config.model_dump(), **quick})
    built = build_all(config.formats, program, rows, config, store)
    judged = judge_variants(program, tuple(built.values()), rows, config, store)
    for variant in judged:
        if not variant.latencies:
            print(f"  {variant.name}: {variant.reason}")
    return Converted(program, tuple(v for v in judged if v.latencies), store)


def build_all(
    formats: Sequence[str],
    program: RegisteredProgram,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> dict[str, BuiltVariant]:
    """The variants of some formats and of those that they are made from, by name."""
    built: dict[str, BuiltVariant] = {}
    for target in with_sources(tuple(formats)):
        sources = tuple(built[name] for name in target.made_from)
        built[target.name] = build_variant(target, program, sources, rows, config, store)
    return built


def timed(models: Mapping[str, LoadedModel], batch: ModelInputs, bench: Bench) -> Times:
    """CPU time of all models on one batch, shown on the screen."""
    calls = {name: partial(model, batch) for name, model in models.items()}
    times = time_interleaved(calls, bench.size(NUM_TURNS, 2), TURN_MS)
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
