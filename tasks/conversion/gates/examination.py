"""Looking at one built form: is it what it says, does it answer like PyTorch, and does it always.

What fails here is a finding about the form, told as a sentence; the others are examined all the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.gates.batch_invariance import steadiness_failure
from tasks.conversion.gates.parity import (
    ScoreGap,
    answered_gap,
    parity_failure,
    score_batches,
    score_gap,
)
from tasks.conversion.kinds.interface import Batches, Family, JudgedRows, Scores
from tasks.conversion.kinds.registry import bound_of, family_of
from tasks.conversion.loading import load_variant
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.registry import TARGET
from tasks.conversion.targets.runtimes import LoadedModel, load_pytorch
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import ArtifactStore


@dataclass(frozen=True)
class Examined:
    """One built form after it was loaded and compared with PyTorch; not yet timed."""

    built: BuiltVariant
    failure: str | None
    model: LoadedModel | None = None
    rows: ScoreGap | None = None
    edges: ScoreGap | None = None
    change: Metric | None = None
    """Of the task metric."""


@dataclass(frozen=True)
class Reference:
    """The PyTorch program, its answers, and everything the forms are compared on."""

    program: RegisteredProgram
    model: LoadedModel
    family: Family
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
    family = family_of(program)
    judged = family.read_judged(program, rows, config, store)
    timed = tuple(judged.timing_batch(size) for size in config.batch_sizes)
    model = load_pytorch(store.path(program.program), program.signature, Runtime(config.threads))
    scores = score_batches(model, judged.batches)
    if judged.distances_of is not None:
        judged = replace(judged, distances=judged.distances_of(scores))
    return Reference(
        program=program,
        model=model,
        family=family,
        judged=judged,
        timed=timed,
        scores=scores,
        edge_scores=score_batches(model, judged.edges),
        timed_scores=score_batches(model, timed),
    )


def runtime_for(name: str, config: ConversionConfig) -> Runtime:
    """How a form is run here: on the hardware that is measured, or compared on the processor."""
    is_here = TARGET[name].is_for(config.hardware_class)
    return Runtime(config.threads, config.hardware_class if is_here else "cpu")


def examine(
    built: BuiltVariant, reference: Reference, config: ConversionConfig, store: ArtifactStore
) -> Examined:
    """Load one form and compare it with PyTorch."""
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
    judged, bound = reference.judged, bound_of(reference.family, built.precision, config)
    wording, distances = judged.wording, judged.distances
    scores = score_batches(model, judged.batches)
    if (kind := str(scores.dtype)) != (promised := model.signature.output.dtype):
        return Examined(built, f"it answers with {kind}, its signature says {promised}")
    rows = score_gap(reference.scores, scores, distances)
    edges = answered_gap(reference.edge_scores, score_batches(model, judged.edges), distances)
    timed = score_gap(reference.timed_scores, score_batches(model, reference.timed), distances)
    change = judged.change(reference.scores, scores)
    failure = (
        parity_failure(rows, edges, timed, bound, wording)
        or steadiness_failure(model, judged.batches, scores, distances, bound, wording, config.seed)
        or quality_failure(change, bound, wording.metric)
        or hardware_failure(built.name, config.hardware_class)
    )
    return Examined(built, failure, model, rows, edges, change)


def hardware_failure(name: str, hardware_class: str) -> str | None:
    """Why a form cannot be measured on this machine, as a sentence; None where it can."""
    target = TARGET[name]
    if target.is_for(hardware_class):
        return None
    return (
        f"it agrees with PyTorch, and is for {' and '.join(target.hardware)}: its speed cannot be "
        f"measured on {hardware_class}. Convert on such a machine to keep it"
    )


def quality_failure(change: Metric, bound: QualityBound, name: str) -> str | None:
    """Why a change of the task metric is beyond the bound, as a sentence; None where within."""
    if change.low >= -bound.quality_drop:
        return None
    return (
        f"{name} changes by {change.value:+.5f} ({change.low:+.5f} to {change.high:+.5f}) on the "
        f"test rows, it may lose {bound.quality_drop:.5f}"
    )
