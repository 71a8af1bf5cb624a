"""One small program with all its forms, and the fixtures that build it, for folders to import."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tasks.contracts.release import BuiltVariant
from tasks.conversion.kinds.interface import JudgedRows
from tasks.conversion.kinds.tabular import edge_rows, score_distances, tabular_inputs
from tasks.conversion.provenance import computes_bf16
from tasks.conversion.targets.catalog import FORMATS
from tasks.conversion.targets.interface import (
    ConversionJob,
    LoadedModel,
    ModelInputs,
    Runtime,
    load_files,
)
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.programs import QUICK, SmallNetwork, built, tabular_job, with_formats
from tests.support.data import encoders
from tests.support.data.builders import COLUMNS, frame


@dataclass(frozen=True)
class Converted(ConversionJob):
    """One small program and how it was converted."""

    def load(self, variant: BuiltVariant) -> LoadedModel:
        assert variant.files is not None, variant.failure
        folder = self.store.path(variant.files)
        return load_files(variant.name, folder, self.program.signature, Runtime())

    def load_source(self) -> LoadedModel:
        path = self.store.path(self.program.program)
        return load_pytorch(path, self.program.signature, Runtime())


@dataclass(frozen=True)
class Case(Converted):
    """A program of tables with everything it is converted and judged with."""

    onnx: BuiltVariant
    openvino: BuiltVariant
    int8: BuiltVariant

    @property
    def built(self) -> tuple[BuiltVariant, ...]:
        return self.onnx, self.openvino, self.int8


NAMES = tuple(
    target.name
    for target in FORMATS
    if target.file_format in ("onnx", "openvino")
    and (target.precision != "bf16" or computes_bf16())
)
"""Targets that need no more than the project's own packages and this processor."""


@dataclass(frozen=True)
class TextCase(Converted):
    """A small encoder and all its forms."""

    built: dict[str, BuiltVariant]

    def answers(self, name: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return self.load(self.built[name])(inputs)

    def expected(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return self.load_source()(inputs)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextCase:
    """All forms of a small encoder."""
    store = ArtifactStore(tmp_path_factory.mktemp("texts") / "artifacts")
    program, rows = encoders.registered(store, "encoder"), encoders.prepared(store)
    job = with_formats(ConversionJob(program, rows, QUICK, store), *NAMES)
    return TextCase(**vars(job), built={one.name: one for one in built(job)})


def judged_rows(*batches: ModelInputs, **changes: Any) -> JudgedRows:
    """Rows of scores, of which no change of the metric and no timing are asked for."""
    unasked = {name: lambda *_: pytest.fail("not asked for") for name in ("change", "timing_batch")}
    given = {"edges": (), "distances": score_distances, "metric": "AUC", "unit": "", **unasked}
    return JudgedRows(**{"batches": batches, **given, **changes})


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """All three forms of one small program: built once, several tests look at them."""
    store = ArtifactStore(tmp_path_factory.mktemp("conversion") / "artifacts")
    job = tabular_job(store, SmallNetwork())
    onnx, openvino, int8 = built(job)
    return Case(**vars(job), onnx=onnx, openvino=openvino, int8=int8)


@pytest.fixture
def typical() -> ModelInputs:
    return tabular_inputs(*COLUMNS.model_inputs(frame(1500, seed=5)))


@pytest.fixture
def edges(typical: ModelInputs) -> ModelInputs:
    return edge_rows(typical, 1024)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Of a module that imports it."""
    with torch_threads_restored():
        yield
