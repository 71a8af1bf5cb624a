"""A small text encoder with all its forms, as the tests of the second family look at it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.contracts.conversion import PreparedRows
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.provenance import computes_bf16
from tasks.conversion.targets.catalog import FORMATS
from tasks.conversion.targets.interface import Runtime, load_files
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.programs import built
from tests.support.data import encoders

NAMES = tuple(
    target.name
    for target in FORMATS
    if target.file_format in ("onnx", "openvino")
    and (target.precision != "bf16" or computes_bf16())
)
"""Targets that need no more than the project's own packages and this processor."""


@dataclass(frozen=True)
class TextCase:
    """A small encoder and all its forms."""

    store: ArtifactStore
    program: RegisteredProgram
    rows: PreparedRows
    config: ConversionConfig
    built: dict[str, BuiltVariant]

    def answers(self, name: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
        files = self.built[name].files
        assert files is not None, self.built[name].failure
        folder = self.store.path(files)
        return load_files(name, folder, self.program.signature, Runtime())(inputs)

    def expected(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        path = self.store.path(self.program.program)
        return load_pytorch(path, self.program.signature, Runtime())(inputs)


def text_case(store: ArtifactStore, quick: ConversionConfig) -> TextCase:
    """All forms of a small encoder, built in this store."""
    program, rows = encoders.registered(store, "encoder"), encoders.prepared(store)
    config = quick.model_copy(update={"formats": NAMES})
    made = {one.name: one for one in built(program, rows, config, store)}
    return TextCase(store, program, rows, config, made)
