"""What the modules of the formats share: model inputs, builds, loaded models, provenance.

How each file format is built, loaded, and asked where its files come from: see `Converter`.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.conversion import BATCH_AXIS, ConversionRows, Signature
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.targets.catalog import Format, format_of
from tasks.kernel.errors import ConversionError, DataContractError
from tasks.kernel.settings import ArtifactStore

SEED = 0
"""Of every draw: calibrating rows, edge rows, bootstrap; so equal inputs give equal variants."""
Array = NDArray[Any]
FloatArray = NDArray[np.floating[Any]]
Scores = NDArray[np.floating[Any]]
"""What a program answers for some rows; the first axis counts the rows."""
Distances = Callable[[Scores, Scores], FloatArray]
"""How far two models' answers for the same rows are apart, one figure a row, 0 for equal."""


class ModelInputs(dict[str, Array]):
    """Arrays by the name of the input that takes them; the first axis of each counts the rows."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Refuse arrays of different lengths."""
        super().__init__(arrays)
        lengths = {name: len(array) for name, array in self.items()}
        if len(set(lengths.values())) != 1:
            raise DataContractError(
                f"model inputs have {lengths or 'no'} rows, expected the same number in each array"
            )

    @property
    def num_rows(self) -> int:
        """Rows of every array."""
        return len(next(iter(self.values())))

    def block(self, start: int, end: int) -> ModelInputs:
        """Rows `start` to before `end`, or fewer where there are not so many."""
        return ModelInputs({name: array[start:end] for name, array in self.items()})

    def blocks(self, rows: int) -> Iterator[ModelInputs]:
        """All rows, `rows` at a time."""
        for start in range(0, self.num_rows, rows):
            yield self.block(start, start + rows)

    def taken(self, index: NDArray[np.int64]) -> ModelInputs:
        """The rows at these places, in this order."""
        return ModelInputs({name: array[index] for name, array in self.items()})

    def repeated(self, rows: int) -> ModelInputs:
        """Exactly `rows` rows: the first ones, started over where there are not so many."""
        return self.taken(np.arange(rows) % self.num_rows)


Batches = tuple[ModelInputs, ...]
Scorer = Callable[[ModelInputs], NDArray[np.float32]]


PROVENANCE_PREFIX = "falaj"
# ONNX Runtime puts file, line and C++ signature before its reason, which would be cut off.
_PLACE_IN_SOURCE = re.compile(r"/onnxruntime_src/\S+:\d+ .*?\) (?=\w)")
Float32Array = NDArray[np.float32]
Score = Callable[[dict[str, Array]], Float32Array]


@dataclass(frozen=True)
class ConversionJob:
    """One program, the rows that calibrate and judge its variants, and what is asked for."""

    program: RegisteredProgram
    rows: ConversionRows
    config: ConversionConfig
    store: ArtifactStore
    """Holds all files of the job, and takes new ones."""


@dataclass(frozen=True)
class BuildRequest(ConversionJob):
    """Everything that a variant may be built from."""

    sources: Mapping[str, BuiltVariant]
    """The variants that it is made from, failed ones included, by name."""
    provenance: Mapping[str, str]
    """To be written into the files, as the last step."""
    sample: Batches = ()
    """Calibrating calls; empty where the format needs none."""

    def source_folder(self, name: str) -> Path:
        """Folder of a variant that this one is made from, its content verified.

        Raises:
            ConversionError: that variant itself could not be built.
            ArtifactError: its files are gone or damaged.
        """
        source = self.sources[name]
        if source.files is None:
            raise ConversionError(f"it is made from {source.name}, which failed: {source.failure}")
        return self.store.path(source.files)


@dataclass(frozen=True)
class Runtime:
    """How a variant is to be run; what a runtime really does is read back."""

    threads: int = 1
    """Within one call."""
    hardware_class: str = "cpu"


@dataclass(frozen=True)
class LoadedModel:
    """A model in the runtime that serves it."""

    score: Score
    signature: Signature
    settings: dict[str, str]
    load_ms: float
    refusals: tuple[type[Exception], ...] = (RuntimeError,)
    """What the runtime raises where it cannot answer."""

    def __call__(self, inputs: Mapping[str, Array]) -> Float32Array:
        """Answers, float32, in the order of the rows; their shape is the signature's output.

        Args:
            inputs: an array for each input of the signature, rows first; any layout and any type
                of number.

        Raises:
            DataContractError: an array is absent, or does not have the model's shape.
            ConversionError: the runtime cannot answer.
        """
        arrays: dict[str, Array] = {}
        axes: dict[str, int] = {}
        for name, dtype, shape in self._inputs:
            array = inputs.get(name)
            if array is None or not _fits(np.shape(array), shape, axes):
                seen = {name: np.shape(array) for name, array in inputs.items()}
                expected = {spec.name: spec.shape for spec in self.signature.inputs}
                raise DataContractError(
                    f"model inputs have shapes {seen}, expected {expected}; were they swapped?"
                )
            arrays[name] = np.ascontiguousarray(array, dtype)
        if axes[BATCH_AXIS] == 0:
            sizes = [
                axes.get(a, 0) if isinstance(a, str) else a for a in self.signature.output.shape
            ]
            return np.empty(sizes, dtype=np.float32)
        try:
            return self.score(arrays)
        except self.refusals as exc:
            raise ConversionError(
                f"{self.settings['runtime']} cannot answer a call of {axes[BATCH_AXIS]} rows: "
                f"{first_line_of(exc)}"
            ) from exc

    @cached_property
    def _inputs(self) -> tuple[tuple[str, np.dtype[Any], tuple[str | int, ...]], ...]:
        """The signature's inputs as plain values: a call of one row takes microseconds."""
        return tuple(
            (spec.name, np.dtype(spec.dtype), spec.shape) for spec in self.signature.inputs
        )


def _fits(shape: tuple[int, ...], expected: tuple[str | int, ...], axes: dict[str, int]) -> bool:
    """Whether a shape is the expected one; an axis of any length is the same in all inputs."""
    if len(shape) != len(expected):
        return False
    for length, axis in zip(shape, expected, strict=True):
        if length != (axis if isinstance(axis, int) else axes.setdefault(str(axis), length)):
            return False
    return True


def loaded(
    start: float,
    score: Score,
    signature: Signature,
    settings: dict[str, str],
    wanted: Mapping[str, str],
    refusals: tuple[type[Exception], ...] = (RuntimeError,),
) -> LoadedModel:
    """A model whose runtime took the wanted settings, as they were read back from it.

    Raises:
        ConversionError: it runs with another setting.
    """
    for name, value in wanted.items():
        if settings[name] != value:
            raise ConversionError(
                f"{settings['runtime']} runs with {name} {settings[name]!r}, expected {value!r}; "
                "figures taken so would not hold elsewhere. Look for environment variables or a "
                "runtime version that override it"
            )
    return LoadedModel(score, signature, settings, (time.perf_counter() - start) * 1e3, refusals)


def check_quantisable(present: Collection[str], layers: Collection[str]) -> None:
    """Refuse a model without a layer that is quantised.

    Raises:
        ConversionError: there is none.
    """
    if not set(present).intersection(layers):
        raise ConversionError(
            f"the model has no {' or '.join(layers)} to quantise, only {', '.join(sorted(present))}"
        )


def first_line_of(error: BaseException) -> str:
    """First line of the innermost cause: the libraries wrap the reason in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _PLACE_IN_SOURCE.sub(" ", lines[0] if lines else type(error).__name__)[:400]


class Converter(Protocol):
    """What the module of a file format gives."""

    def build(self, made: Format, request: BuildRequest, folder: Path) -> dict[str, str]:
        """Write the files, provenance included, into an empty folder; returns how.

        Raises `ConversionError` where the variant cannot be built.
        """

    def load(
        self, made: Format, folder: Path, signature: Signature, runtime: Runtime
    ) -> LoadedModel:
        """Load the files of a folder.

        Raises `ConversionError` where the runtime refuses them, or runs otherwise.
        """

    def read_provenance(self, folder: Path) -> dict[str, str]:
        """The provenance of the files; empty where they have none.

        Raises `ArtifactError` where the files cannot be read.
        """

    def equipment(self, made: Format) -> dict[str, str]:
        """What of this machine decides the files, packages apart.

        Raises `ConversionError` where something is missing to build here.
        """


CONVERTERS = {
    "onnx": "tasks.conversion.targets.onnx",
    "openvino": "tasks.conversion.targets.openvino",
    "tensorrt": "tasks.conversion.targets.tensorrt",
}
"""File format to its module, imported with its libraries when it is used."""


def converter_of(made: Format) -> Converter:
    """What builds and loads a format."""
    return cast(Converter, importlib.import_module(CONVERTERS[made.file_format]))


def load_files(name: str, folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    """Load the files of a format without a look at where they come from.

    Raises:
        ConversionError: the runtime refuses them, or runs otherwise.
        ConfigurationError: there is no such format.
    """
    made = format_of(name)
    return converter_of(made).load(made, folder, signature, runtime)
