"""One small program with all its forms, and the fixtures that build it, for folders to import."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tasks.contracts.conversion import SnapshotRows
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.tabular import edge_rows, tabular_inputs
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime, load_files
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.programs import SmallNetwork, built, exported, registered
from tests.support.data.builders import COLUMNS, dataset, frame, splits


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

    @property
    def rows(self) -> SnapshotRows:
        return SnapshotRows(dataset=self.dataset, splits=splits())

    def load(self, variant: BuiltVariant) -> LoadedModel:
        assert variant.files is not None
        folder = self.store.path(variant.files)
        return load_files(variant.name, folder, self.program.signature, Runtime())

    def load_source(self) -> LoadedModel:
        path = self.store.path(self.program.program)
        return load_pytorch(path, self.program.signature, Runtime())


QUICK = ConversionConfig(batch_sizes=(1, 8), measurement="quick")


@pytest.fixture(scope="session")
def quick() -> ConversionConfig:
    return QUICK


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory, quick: ConversionConfig) -> Case:
    """All three forms of one small program: built once, several tests look at them."""
    store = ArtifactStore(tmp_path_factory.mktemp("conversion") / "artifacts")
    rows = dataset(store)
    program = registered(store, rows, exported(SmallNetwork()))
    onnx, openvino, int8 = built(program, rows, quick, store)
    return Case(store, rows, program, quick, onnx, openvino, int8)


@pytest.fixture
def typical() -> ModelInputs:
    return tabular_inputs(*COLUMNS.model_inputs(frame(1500, seed=5)))


@pytest.fixture
def edges(typical: ModelInputs) -> ModelInputs:
    return edge_rows(typical, 1024)
