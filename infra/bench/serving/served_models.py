"""Models of the benches of serving: an ONNX file, and small registered versions with a variant."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from infra.bench.serving import onnx_server
from infra.bench.serving.onnx_server import CATEGORICAL, NUMERIC, PROBE
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import (
    MOST_ROWS,
    ImportedProgram,
    PreparedRows,
    Signature,
    TensorSpec,
)
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.onnx import export_onnx
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.variants import build_variant
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tasks.registry.candidate import register_import
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CHAMPION, Registry
from tasks.registry.model_folder import attach_variants
from tasks.registry.programs import fetch_version

MODEL = "bench"
COLUMNS = 40
FORM = "onnx-fp32"
SIGNATURE = Signature(
    inputs=(TensorSpec(name="rows", dtype="float32", shape=("batch", COLUMNS)),),
    output=TensorSpec(name="score", dtype="float32", shape=("batch",)),
    largest={"batch": 65_536},
)


class Tabular(nn.Module):
    """Embeddings, missing numbers as zero with a flag, two hidden layers, a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tables = nn.ModuleList(nn.Embedding(512, 16) for _ in range(CATEGORICAL))
        self.layers = nn.Sequential(
            *(nn.Linear(2 * NUMERIC + CATEGORICAL * 16, 256), nn.ReLU()),
            *(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid()),
        )

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """One score a row."""
        absent = numeric.isnan()
        numbers = torch.where(absent, torch.zeros(()), numeric)
        embedded = [table(categorical[:, n]) for n, table in enumerate(self.tables)]
        scores: Tensor = self.layers(torch.cat([numbers, absent.float(), *embedded], 1))
        return scores.squeeze(1)


def write_program(path: Path) -> Path:
    """The network as an ONNX file; weights are seeded."""
    batch = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    example = tuple(torch.from_numpy(np.repeat(array, 2, axis=0)) for array in PROBE.values())
    program = torch.export.export(
        Tabular().eval(), example, dynamic_shapes={name: {0: batch} for name in PROBE}
    )
    onnx.save(export_onnx(program, onnx_server.SIGNATURE), path)
    return path


class _Network(nn.Module):
    """As wide as the dense part of a model of tables."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(COLUMNS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        self.seed = seed

    def forward(self, rows: Tensor) -> Tensor:
        """One score a row; those of different seeds are far apart."""
        logits: Tensor = self.layers(rows).squeeze(1)
        return torch.sigmoid(logits) + self.seed


@dataclass(frozen=True)
class BenchHome:
    """An installation with a registry of its own."""

    home: Path
    location: RegistryLocation
    store: ArtifactStore

    @classmethod
    def at(cls, home: Path) -> BenchHome:
        """An installation in an empty folder."""
        uri = f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"
        location = RegistryLocation(uri=uri, artifacts=home / "mlflow" / "artifacts")
        return cls(home, location, ArtifactStore(home / "artifacts"))

    def add(self, seed: int, promote: bool = False) -> ModelVersionRef:
        """Register a version, convert it, and let the alias name it where asked."""
        config = RegistryConfig(model_name=MODEL, experiment="bench")
        ref = register_import(self._program(seed), config, self.location, self.store, "bench")
        program = fetch_version(ref, self.location, self.store)
        form = build_variant(
            FORMAT[FORM], program, (), self._rows(), ConversionConfig(formats=(FORM,)), self.store
        )
        attach_variants(ref, (_kept(form, program),), self.location, self.store)
        if promote:
            registry = Registry(self.location)
            registry.set_alias(registry.confirmed(ref), CHAMPION)
        return ref

    def answers(self, ref: ModelVersionRef, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a version's program gives in PyTorch."""
        program = fetch_version(ref, self.location, self.store)
        model = load_pytorch(self.store.path(program.program), program.signature, Runtime())
        return model({"rows": rows})

    def _program(self, seed: int) -> ImportedProgram:
        def build(folder: StagedFolder) -> ImportedProgram:
            batch = torch.export.Dim("batch", min=1, max=65_536)
            network = _Network(seed).eval()
            shapes = {"rows": {0: batch}}
            example = (torch.zeros(2, COLUMNS),)
            content = io.BytesIO()
            torch.export.save(torch.export.export(network, example, dynamic_shapes=shapes), content)
            (folder.path / "model.pt2").write_bytes(content.getvalue())
            program = folder.artifact("model.pt2")
            return ImportedProgram(
                program=program,
                family="tensors",
                signature=SIGNATURE,
                origin={"package": "bench", "version": str(seed)},
                files={"model.pt2": program.sha256},
                origin_sha256=program.sha256,
            )

        return self.store.build_once("programs", f"bench-{seed}", ImportedProgram, build)

    def _rows(self) -> PreparedRows:
        """Rows that nothing is calibrated on: the form takes none."""

        def build(folder: StagedFolder) -> PreparedRows:
            pq.write_table(pa.table({"part": ["judged"]}), folder.path / "rows.parquet")
            return PreparedRows(
                data=folder.artifact("rows.parquet"), num_calibration=1, num_judged=1, made_from={}
            )

        return self.store.build_once("corpora", "bench", PreparedRows, build)


def _kept(form: BuiltVariant, program: RegisteredProgram) -> ModelVariant:
    """The form as conversion hands it on when it was kept, unmeasured."""
    if form.files is None:
        raise RuntimeError(f"{form.name} could not be built: {form.failure}")
    return ModelVariant(
        **form.model_dump(
            include={"name", "format", "precision", "files", "settings", "provenance"}
        ),
        hardware_class="cpu",
        source_sha256=program.program.sha256,
        parity_max=None,
        parity_mean=None,
        latencies=(),
        num_bytes=form.files.num_bytes,
        load_ms=None,
        accepted=True,
        reason="It is measured here.",
    )
