"""Which converted forms of a model are worth having, and why the others are not.

From simple to complex, each form has to prove that it is what it says, answers like PyTorch, keeps
the task metric, and is measured faster than the fastest simpler form at one batch size at least.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.measurement import OperatorProfile, VariantThroughput
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.gates.choice import choose
from tasks.conversion.gates.comparison import EAGER, Measurements, decide
from tasks.conversion.gates.examination import (
    Examined,
    Reference,
    examine,
    runtime_for,
    take_reference,
)
from tasks.conversion.gates.footprint import Footprint, measure_footprints
from tasks.conversion.gates.latency import Timing, time_interleaved
from tasks.conversion.gates.profiles import top_operators
from tasks.conversion.gates.throughput import measure_throughput, usable_cores
from tasks.conversion.loading import load_variant
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.registry import TARGETS
from tasks.conversion.targets.runtimes import LoadedModel, load_pytorch, torch_threads_restored
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore

logger = logging.getLogger(__name__)


def judge_variants(
    program: RegisteredProgram,
    built: tuple[BuiltVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> tuple[ModelVariant, ...]:
    """Compare, measure and keep or drop every target.

    Args:
        program: the source of all forms.
        built: forms as they were built, failed ones included, in any order.
        rows: judge the forms; which of them is the family's affair.
        config: targets, bounds, timing.
        store: holds all files.

    Returns:
        One variant a target, from simple to complex; dropped ones too, with the reason.

    Raises:
        ConfigurationError: a target is not among `built`, or the rows are not of the family's kind.
        ArtifactError: the program or the rows are absent or damaged. A form that is so is dropped.
        DataContractError: the rows cannot judge: none, labels that are all equal, other columns.
        ConversionError: the program itself does not load.
    """
    targets = _targets(built, config)
    with torch_threads_restored():
        reference = take_reference(program, rows, config, store)
        examined = [examine(one, reference, config, store) for one in targets]
        measured = _measure(reference, examined, config, store)
    decided = decide(program, examined, measured, config, reference.judged.wording)
    variants = choose(decided, config)
    for variant in variants:
        logger.info("%s: %s", variant.name, variant.reason)
    return variants


def _targets(built: tuple[BuiltVariant, ...], config: ConversionConfig) -> list[BuiltVariant]:
    """The built forms that are targets, from simple to complex."""
    by_name = {one.name: one for one in built}
    absent = [name for name in config.targets if name not in by_name]
    if absent:
        raise ConfigurationError(
            f"targets {', '.join(absent)} were not handed to the judge, only "
            f"{', '.join(by_name) or 'nothing'}; build every target first, failed ones count"
        )
    return [by_name[target.name] for target in TARGETS if target.name in config.targets]


def _measure(
    reference: Reference,
    examined: Sequence[Examined],
    config: ConversionConfig,
    store: ArtifactStore,
) -> Measurements:
    """Everything that is measured of the forms that passed, and of PyTorch eager beside them."""
    passed = [one.built for one in examined if one.model is not None and not one.failure]
    models = {one.built.name: one.model for one in examined if one.model is not None}
    if not passed:
        return Measurements({}, {}, {}, {})
    racing = {EAGER: reference.model, **{built.name: models[built.name] for built in passed}}
    return Measurements(
        timings=_time_all(reference, racing, config),
        throughputs={one.name: _throughput(one, reference, config, store) for one in passed},
        footprints=_footprints(passed, reference, config, store),
        profiles=_profiles(passed, reference, config, store) if config.profiled else {},
    )


def _time_all(
    reference: Reference, models: dict[str, LoadedModel], config: ConversionConfig
) -> dict[int, dict[str, Timing]]:
    """Time PyTorch eager and every form that passed, at every batch size, beside each other."""
    timings = {}
    for batch_rows, batch in zip(config.batch_sizes, reference.timed, strict=True):
        calls = {name: partial(model, batch) for name, model in models.items()}
        timings[batch_rows] = time_interleaved(calls, config.timing_rounds, config.round_ms)
    return timings


def _throughput(
    built: BuiltVariant, reference: Reference, config: ConversionConfig, store: ArtifactStore
) -> VariantThroughput:
    runtime = runtime_for(built.name, config)
    return measure_throughput(
        partial(load_variant, built, reference.program, runtime, store),
        reference.judged.timing_batch(config.throughput_rows),
        config.streams or max(1, usable_cores() // config.threads),
        config.round_ms,
    )


def _footprints(
    passed: Sequence[BuiltVariant],
    reference: Reference,
    config: ConversionConfig,
    store: ArtifactStore,
) -> dict[str, Footprint]:
    if not config.measure_memory:
        return {}
    batch = reference.judged.timing_batch(config.throughput_rows)
    return measure_footprints(
        passed, reference.program, batch, config.threads, config.hardware_class, store
    )


def _profiles(
    passed: Sequence[BuiltVariant],
    reference: Reference,
    config: ConversionConfig,
    store: ArtifactStore,
) -> dict[str, OperatorProfile]:
    """Operators of PyTorch eager and of every form whose runtime tells of them."""
    program = reference.program
    told = Runtime(config.threads, profiled=True)
    eager = load_pytorch(store.path(program.program), program.signature, told)
    profilers = {EAGER: eager.profiler}
    for built in passed:
        runtime = replace(runtime_for(built.name, config), profiled=True)
        profilers[built.name] = load_variant(built, program, runtime, store).profiler
    batch = reference.judged.timing_batch(config.throughput_rows)
    return {
        name: top_operators(profiler, batch)
        for name, profiler in profilers.items()
        if profiler is not None
    }
