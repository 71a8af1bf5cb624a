"""What the conversion has to know of a family of models; everything else is the same for all.

A family is one module with one `Family`, entered in `families/registry.py`. It says how rows become
model inputs, how two answers for the same row differ, and what the answers are worth. Signature and
weights are the program's, so a family serves any program that takes and gives such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.triton.config import TritonConfig
from tasks.conversion.triton.model import TritonModel
from tasks.kernel.settings import ArtifactStore

Scores = NDArray[np.floating[Any]]
"""What a program gives for some rows; the first axis counts the rows."""
FloatArray = NDArray[np.floating[Any]]
Batches = tuple[ModelInputs, ...]
Distances = Callable[[Scores, Scores], FloatArray]
"""How far two models' answers for the same rows are apart, one figure a row, 0 for equal."""


@dataclass(frozen=True)
class Wording:
    """How gaps and metric are told to people."""

    one: str
    """One answer, such as `a probability`."""
    many: str
    unit: str
    """Of a gap, with a space before it; empty where a gap has none."""
    metric: str


@dataclass(frozen=True)
class JudgedRows:
    """Rows that a program and the forms made from it are compared on."""

    batches: Batches
    """Ordinary rows, in calls of a size that every program of the family takes."""
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


def no_front(
    program: RegisteredProgram, rows: ConversionRows, config: TritonConfig, store: ArtifactStore
) -> TritonModel | None:
    """Nothing stands before a program that takes what its clients have."""
    return None


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    name: str
    bounds: Mapping[str, QualityBound]
    """What a form of each precision may change, unless the configuration says otherwise."""
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
    front: Callable[
        [RegisteredProgram, ConversionRows, TritonConfig, ArtifactStore], TritonModel | None
    ] = no_front
    """Where Triton serves it: what makes the program's inputs of what clients have."""
    is_transformer: bool = False
    """Quantisers then keep what attention needs in floats."""
