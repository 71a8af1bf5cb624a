"""Examining one variant: does it answer like PyTorch, always, and keep the task metric.

A failure is a finding about the variant; the others are examined all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.gates.parity import (
    ScoreGap,
    batch_invariance_failure,
    parity_failure,
    score_batches,
    score_gap,
)
from tasks.conversion.inputs import Batches, Scores
from tasks.conversion.kinds.interface import JudgedRows, ModelKind
from tasks.conversion.kinds.registry import bound_of, kind_of
from tasks.conversion.loading import load_variant
from tasks.conversion.targets.catalog import format_of
from tasks.conversion.targets.interface import LoadedModel, Runtime
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import ArtifactStore


@dataclass(frozen=True)
class Examined:
    """One variant after it was loaded and compared with PyTorch; not yet timed."""

    built: BuiltVariant
    failure: str | None
    model: LoadedModel | None = None
    rows: ScoreGap | None = None
    edges: ScoreGap | None = None
    change: Metric | None = None
    """Of the task metric."""


@dataclass(frozen=True)
class Reference:
    """The PyTorch program, its answers, and everything the variants are compared on."""

    program: RegisteredProgram
    model: LoadedModel
    kind: ModelKind
    judged: JudgedRows
    timed: Batches
    """Calls of the sizes at which latency is taken: what is fast there has to be right there."""
    scores: Scores
    edge_scores: Scores
    timed_scores: Scores


def take_reference(
    program: RegisteredProgram, rows: ConversionRows, config: ConversionConfig, store: ArtifactStore
) -> Reference:
    """Load the program and answer all rows with it.

    Raises:
        ArtifactError: program or rows are absent or damaged.
        DataContractError: the rows cannot judge.
        ConversionError: the program does not load.
    """
    kind = kind_of(program)
    judged = kind.read_judged(program, rows, config, store)
    timed = tuple(judged.timing_batch(size) for size in config.batch_sizes)
    model = load_pytorch(store.path(program.program), program.signature, Runtime(config.threads))
    scores = score_batches(model, judged.batches)
    if judged.distances_of is not None:
        judged = replace(judged, distances=judged.distances_of(scores))
    edge_scores, timed_scores = (score_batches(model, calls) for calls in (judged.edges, timed))
    return Reference(program, model, kind, judged, timed, scores, edge_scores, timed_scores)


def runtime_for(name: str, config: ConversionConfig) -> Runtime:
    """How a variant is run here: on the hardware that is measured, or compared on the processor."""
    is_here = format_of(name).is_for(config.hardware_class)
    return Runtime(config.threads, config.hardware_class if is_here else "cpu")


def examine(
    built: BuiltVariant, reference: Reference, config: ConversionConfig, store: ArtifactStore
) -> Examined:
    """Load one variant and compare it with PyTorch."""
    if built.files is None:
        return Examined(built, failure=f"not built: {built.failure}")
    try:
        runtime = runtime_for(built.name, config)
        load_variant(built, reference.program, runtime, store)  # brings the library in, untimed
        model = load_variant(built, reference.program, runtime, store)
        return _compare(built, model, reference, config)
    except (ConversionError, ArtifactError) as exc:
        return Examined(built, failure=str(exc))


def _compare(
    built: BuiltVariant, model: LoadedModel, reference: Reference, config: ConversionConfig
) -> Examined:
    judged, bound = reference.judged, bound_of(reference.kind, built.precision, config)
    distances = judged.distances
    scores = score_batches(model, judged.batches)
    if (dtype := str(scores.dtype)) != (promised := model.signature.output.dtype):
        return Examined(built, f"it answers with {dtype}, its signature promises {promised}")
    rows = score_gap(reference.scores, scores, distances)
    edge_scores = score_batches(model, judged.edges)
    edges = score_gap(reference.edge_scores, edge_scores, distances, answered=True)
    timed = score_gap(reference.timed_scores, score_batches(model, reference.timed), distances)
    change = judged.change(reference.scores, scores)
    failure = (
        parity_failure(rows, edges, timed, bound, judged.wording)
        or batch_invariance_failure(model, judged, scores, bound)
        or quality_failure(change, bound, judged.wording.metric)
        or _hardware_failure(built.name, config.hardware_class)
    )
    return Examined(built, failure, model, rows, edges, change)


def quality_failure(change: Metric, bound: QualityBound, name: str) -> str | None:
    """Why a change of the task metric is beyond the bound; None where it is within."""
    if change.low >= -bound.quality_drop:
        return None
    return (
        f"{name} changes by {change.value:+.5f} ({change.low:+.5f} to {change.high:+.5f}) on the "
        f"test rows, it may lose {bound.quality_drop:.5f}"
    )


def _hardware_failure(name: str, hardware_class: str) -> str | None:
    """Why a variant cannot be measured on this machine; None where it can."""
    made = format_of(name)
    if made.is_for(hardware_class):
        return None
    return (
        f"it agrees with PyTorch, and is for {' and '.join(made.hardware)}: its speed cannot be "
        f"measured on {hardware_class}. Convert on such a machine to accept it"
    )
