"""Registered versions with variants, small enough to make in a second, for whatever serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from serving.config import EngineConfig, ServedModel
from serving.engine.engine import ModelEngine
from serving.engine.loading import RegistryCatalogue
from serving.engine.queues import Limits
from serving.interfaces import Answer, Array, Call, settle
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ImportedProgram, tabular_signature
from tasks.contracts.data import DatasetSchema
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.tabular import tabular_inputs
from tasks.conversion.targets.interface import ConversionJob, ModelInputs, Runtime
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder, content_key
from tasks.registry.candidate import register_import
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CHAMPION, Registry
from tasks.registry.model_folder import attach_variants
from tasks.registry.programs import fetch_version
from tests.support.conversion.programs import SmallNetwork, built, exported, kept
from tests.support.data import encoders
from tests.support.data.builders import COLUMNS, frame

FLIGHTS, ENCODER = "flight-delay", "encoder"
QUICK = ConversionConfig(
    formats=("onnx-fp32", "openvino-fp32"), batch_sizes=(1,), measurement="quick"
)


@dataclass(frozen=True)
class ServedHome:
    """An installation with registered versions."""

    home: Path
    location: RegistryLocation
    store: ArtifactStore

    @classmethod
    def at(cls, home: Path) -> ServedHome:
        settings = Settings(home, home / "repo")
        return cls(home, RegistryLocation.of(settings), settings.store)

    def add_flights(self, seed: int = 0, network: nn.Module | None = None) -> ModelVersionRef:
        """A program that takes a table, without variants."""
        return self.add_table(exported(network or SmallNetwork(seed)), seed)

    def add_table(
        self, content: bytes, seed: int = 0, columns: DatasetSchema = COLUMNS
    ) -> ModelVersionRef:
        """A program file that takes a table, without variants."""

        def build(folder: StagedFolder) -> ImportedProgram:
            (folder.path / "model.pt2").write_bytes(content)
            program = folder.artifact("model.pt2")
            return ImportedProgram(
                program=program,
                family="tabular",
                signature=tabular_signature(columns),
                columns=columns,
                origin={"package": "tests", "version": str(seed)},
                files={"model.pt2": program.sha256},
                origin_sha256=program.sha256,
            )

        imported = self.store.build_once(
            "programs", content_key(content.hex()), ImportedProgram, build
        )
        return self._register(imported, FLIGHTS)

    def add_encoder(self) -> ModelVersionRef:
        """A program that takes sequences of any length and gives embeddings, without variants."""
        imported = encoders.program(self.store, self.home / "encoder")
        return self._register(imported, ENCODER)

    def convert(
        self, ref: ModelVersionRef, config: ConversionConfig = QUICK
    ) -> tuple[ModelVariant, ...]:
        """Build the targets of a version and file them with it, unjudged."""
        program = self.program(ref)
        forms = built(ConversionJob(program, encoders.prepared(self.store), config, self.store))
        made = tuple(kept(one, program) for one in forms if one.name in config.formats)
        self.attach(ref, made)
        return made

    def attach(self, ref: ModelVersionRef, variants: tuple[ModelVariant, ...]) -> None:
        """File variants with a version."""
        attach_variants(ref, variants, self.location, self.store)

    def promote(self, ref: ModelVersionRef) -> None:
        """Let the alias that serving follows name a version."""
        registry = Registry(self.location)
        registry.set_alias(registry.confirmed(ref), CHAMPION)

    def folder(self, ref: ModelVersionRef) -> Path:
        """Files of a version."""
        return Registry(self.location).confirmed(ref).folder

    def program(self, ref: ModelVersionRef) -> RegisteredProgram:
        """A version's program."""
        return fetch_version(ref, self.location, self.store)

    def expected(self, ref: ModelVersionRef, inputs: ModelInputs) -> NDArray[np.float32]:
        """What the registered program answers."""
        program = self.program(ref)
        with torch_threads_restored():
            path = self.store.path(program.program)
            return load_pytorch(path, program.signature, Runtime())(inputs)

    def _register(self, imported: ImportedProgram, name: str) -> ModelVersionRef:
        config = RegistryConfig(model_name=name, experiment="imports")
        return register_import(imported, config, self.location, self.store, "abc1234")


def flight_rows(num_rows: int) -> ModelInputs:
    """Typical rows of the table that `add_flights` programs take."""
    return tabular_inputs(*COLUMNS.model_inputs(frame(num_rows, seed=5)))


@asynccontextmanager
async def serving(
    world: ServedHome, *models: ServedModel, **config: Any
) -> AsyncIterator[ModelEngine]:
    """An engine on the registry of an installation, which answers until the context is left."""
    asked, served = EngineConfig(**config), models or (ServedModel(name=FLIGHTS),)
    catalogue = RegistryCatalogue(world.location, world.home, asked, served)
    limits = Limits(poll_s=0.05, retry_s=0.01, most_retry_s=0.05)
    engine = ModelEngine(asked, served, catalogue, limits=limits)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def ask(engine: ModelEngine, model: str, inputs: ModelInputs, **changes: Any) -> Answer:
    """The engine's answer to one call.

    Raises:
        ServingError: what it answered instead.
    """
    outcome: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    call = Call(model, inputs, inputs.num_rows, "r", **changes)
    engine.submit(call, lambda _, told: settle(outcome, told))
    return await asyncio.wait_for(outcome, 30)


def scores(answer: Answer) -> Array:
    """The one output of an answer."""
    (only,) = answer.outputs.values()
    return only
