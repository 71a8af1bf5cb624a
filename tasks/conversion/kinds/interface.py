"""What the conversion has to know of a kind of model; everything else is the same for all.

A kind is one module with one `ModelKind`, entered in `kinds/registry.py`: how rows become model
inputs, how two answers for the same row differ, and what the answers are worth. Signature and
weights are the program's, so a kind serves any program that takes and gives such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound, TritonConfig
from tasks.conversion.inputs import Batches, Distances, ModelInputs, Scores
from tasks.conversion.triton.model import TritonModel
from tasks.kernel.settings import ArtifactStore


@dataclass(frozen=True)
class Wording:
    """How gaps and metric are described to people."""

    one: str
    """One answer, such as `a probability`."""
    many: str
    unit: str
    """Of a gap, with a space before it; empty where a gap has none."""
    metric: str


@dataclass(frozen=True)
class JudgedRows:
    """Rows that a program and its variants are compared on."""

    batches: Batches
    """Ordinary rows, in calls of a size that every program of the kind takes."""
    edges: Batches
    """Rows that data rarely holds, in calls of several sizes, of one row too."""
    distances: Distances
    change: Callable[[Scores, Scores], Metric]
    """What the metric of `batches` loses (below 0) or gains, with its 95 % interval."""
    timing_batch: Callable[[int], ModelInputs]
    """Inputs of so many typical rows, to take the time of a call."""
    wording: Wording
    distances_of: Callable[[Scores], Distances] | None = None
    """Makes `distances` of the program's answers to all of `batches`, where these give the unit: it
    is then the same for whatever is compared, edge rows and a call of a single row too."""


@dataclass(frozen=True)
class ModelKind:
    """One kind of model."""

    name: str
    bounds: Mapping[str, QualityBound]
    """What a variant of each precision may change, unless the configuration says otherwise."""
    read_calibration: Callable[
        [RegisteredProgram, ConversionRows, ConversionConfig, ArtifactStore], Batches
    ]
    """Seeded inputs that show a quantiser the ranges of values.

    Raises `ConversionError` where there is nothing to calibrate on.
    """
    read_judged: Callable[
        [RegisteredProgram, ConversionRows, ConversionConfig, ArtifactStore], JudgedRows
    ]
    """Rows to judge on. Raises `DataContractError` where they cannot judge."""
    front: (
        Callable[
            [RegisteredProgram, ConversionRows, TritonConfig, ArtifactStore], TritonModel | None
        ]
        | None
    ) = None
    """Where Triton serves it: what makes the program's inputs of what clients have."""
    is_transformer: bool = False
    """Quantisers then keep what attention needs in floats."""
