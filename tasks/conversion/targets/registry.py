"""How each file format is built, loaded, and asked where its files come from."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from tasks.contracts.conversion import Signature
from tasks.conversion.targets.catalog import Format, format_of
from tasks.conversion.targets.interface import BuildRequest, LoadedModel, Runtime


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
    "litert": "tasks.conversion.targets.litert",
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
