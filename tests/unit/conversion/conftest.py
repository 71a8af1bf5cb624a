from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.onnx_export import build_onnx
from tasks.conversion.openvino_export import build_openvino
from tasks.conversion.quantization import build_int8
from tasks.conversion.rows import ModelInputs, edge_rows
from tasks.conversion.runtimes import LoadedModel, load, torch_threads_restored
from tasks.settings import ArtifactStore
from tests.builders import COLUMNS, dataset, frame, splits
from tests.unit.conversion.programs import SmallNetwork, exported, registered


@dataclass(frozen=True)
class Case:
    """One small program with everything it is converted and judged with."""

    store: ArtifactStore
    dataset: ValidatedDataset
    program: RegisteredProgram
    config: ConversionConfig
    onnx: BuiltVariant
    openvino: BuiltVariant
    int8: BuiltVariant

    @property
    def built(self) -> tuple[BuiltVariant, ...]:
        return self.onnx, self.openvino, self.int8

    def load(self, variant: BuiltVariant) -> LoadedModel:
        assert variant.files is not None
        return load(self.store.path(variant.files), variant.format, COLUMNS)

    def load_source(self) -> LoadedModel:
        return load(self.store.path(self.program.program), "pytorch", COLUMNS)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    with torch_threads_restored():
        yield


@pytest.fixture(scope="session")
def quick() -> ConversionConfig:
    return ConversionConfig(batch_sizes=(1, 8), timing_rounds=6, round_ms=0.5, auc_replicates=50)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory, quick: ConversionConfig) -> Case:
    """All three forms of one small program: built once, several tests look at them."""
    store = ArtifactStore(tmp_path_factory.mktemp("conversion") / "artifacts")
    rows = dataset(store)
    program = registered(store, rows, exported(SmallNetwork()))
    onnx = build_onnx(program, quick, store)
    openvino = build_openvino(program, onnx, quick, store)
    int8 = build_int8(program, openvino, rows, splits(), quick, store)
    return Case(store, rows, program, quick, onnx, openvino, int8)


@pytest.fixture
def typical() -> ModelInputs:
    return ModelInputs(*COLUMNS.model_inputs(frame(1500, seed=5)))


@pytest.fixture
def edges(typical: ModelInputs) -> ModelInputs:
    return edge_rows(typical, 1024, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")
