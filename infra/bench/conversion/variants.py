"""Build the variants of a model for processors, and compare the CPU time of those that pass.

Every variant is built and judged by conversion's own code. Of those that pass the gates the
best one is reported, by CPU time (user and system) of this process: loaded beside each other, one
thread each, they take turns, and what counts is the ratio within a turn. Wall time is not asked
for, so other programs on the machine disturb little.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from infra.bench.figures import interleaved
from infra.bench.parts import Bench
from tasks.contracts.conversion import ConversionRows
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.convert import judge_variants
from tasks.conversion.decide import EAGER
from tasks.conversion.targets.catalog import FORMATS, with_sources
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime, load_files
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.variants import build_variant
from tasks.kernel.settings import ArtifactStore

WARM_UP_CALLS = 5
NUM_TURNS = 25
TURN_S = 0.05


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds of a call, by name and turn."""

    by_name: Mapping[str, NDArray[np.float64]]

    def share(self, name: str, other: str) -> float:
        """CPU time of `name` as a share of that of `other`: median of the turns' ratios."""
        return float(np.median(self.by_name[name] / self.by_name[other]))

    def milliseconds(self, name: str) -> float:
        """CPU milliseconds of a call, median of the turns."""
        return 1e3 * float(np.median(self.by_name[name]))


def cpu_times(calls: Mapping[str, Callable[[], object]], num_turns: int = NUM_TURNS) -> CpuTimes:
    """CPU time (user and system, all threads of this process) of calls that take turns.

    Each turn repeats its call for about `TURN_S` of CPU, at least once.
    """
    turns = {name: partial(_turn, call, _repeats(call)) for name, call in calls.items()}
    found = interleaved(turns, num_turns)
    return CpuTimes({name: np.array(seconds) for name, seconds in found.items()})


def _repeats(call: Callable[[], object]) -> int:
    for _ in range(WARM_UP_CALLS):
        call()
    return max(1, round(TURN_S / max(_turn(call, 3), 1e-7)))


def _turn(call: Callable[[], object], repeats: int) -> float:
    call()  # not counted: brings code and weights back into the caches
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats


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
    built: dict[str, BuiltVariant] = {}
    for target in with_sources(config.formats):
        sources = tuple(built[name] for name in target.made_from)
        built[target.name] = build_variant(target, program, sources, rows, config, store)
    judged = judge_variants(program, tuple(built.values()), rows, config, store)
    for variant in judged:
        if not variant.latencies:
            print(f"  {variant.name}: {variant.reason}")
    return Converted(program, tuple(v for v in judged if v.latencies), store)


def timed(models: Mapping[str, LoadedModel], batch: ModelInputs, bench: Bench) -> CpuTimes:
    """CPU time of all models on one batch, shown on the screen."""
    times = cpu_times(
        {name: partial(model, batch) for name, model in models.items()}, bench.size(NUM_TURNS, 2)
    )
    described = [f"{name} {times.milliseconds(name):.3f}" for name in models]
    print(f"  CPU ms at batch {batch.num_rows}: {', '.join(described)}", flush=True)
    return times


def best_of(times: CpuTimes, names: list[str], other: str) -> tuple[float, str]:
    """The least share of the CPU time of `other` that one of some forms takes, and which does.

    Infinite where there are none: such a figure misses every bound.
    """
    if not names:
        return math.inf, "no form passes"
    best = min(names, key=lambda name: times.share(name, other))
    described = (
        f"{best} {times.milliseconds(best):.3f} ms, {other} {times.milliseconds(other):.3f} ms"
    )
    return times.share(best, other), described
