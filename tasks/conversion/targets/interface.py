"""What a target is: a format and precision, how it is built, and how it is loaded.

A target is one `Target` in a module of its format, entered in `targets/registry.py`. These modules
are cheap to import, because a configuration is checked against them: the functions that they name
import what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts.conversion import ConversionRows, Signature
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore

if TYPE_CHECKING:
    from tasks.conversion.config import ConversionConfig
    from tasks.conversion.kinds.interface import Batches
    from tasks.conversion.targets.runtimes import LoadedModel


@dataclass(frozen=True)
class BuildRequest:
    """Everything that a target may be built from."""

    program: RegisteredProgram
    sources: Mapping[str, BuiltVariant]
    """The forms that the target is made from, failed ones included, by name."""
    rows: ConversionRows
    config: ConversionConfig
    store: ArtifactStore
    stamp: Mapping[str, str]
    """To be written into the files, as the last step."""
    sample: Batches | None = None
    """Calibrating calls; None where the target takes none."""

    @property
    def program_path(self) -> Path:
        """The `.pt2` file, its content verified.

        Raises:
            ArtifactError: it is absent or damaged.
        """
        return self.store.path(self.program.program)

    def source_folder(self, name: str) -> Path:
        """Folder of a form that the target is made from, its content verified.

        Raises:
            ConversionError: that form itself could not be built.
            ArtifactError: its files are gone or damaged.
        """
        source = self.sources[name]
        if source.files is None:
            raise ConversionError(f"it is made from {source.name}, which failed: {source.failure}")
        return self.store.path(source.files)

    def calibration(self) -> Batches:
        """Inputs that show a quantiser the ranges of values.

        Raises:
            ConversionError: there are none.
        """
        if self.sample is None:
            raise ConversionError("no rows calibrate it; mark the target as one that needs them")
        return self.sample


@dataclass(frozen=True)
class Runtime:
    """How a form is to be run; what a runtime really does is read back."""

    threads: int = 1
    """Within one call."""
    hardware_class: str = "cpu"
    profiled: bool = False
    """Loaded to tell which operators take the time; slower than without."""


Build = Callable[[BuildRequest, Path], dict[str, str]]
"""Writes the files into an empty folder; returns how they were made. `ConversionError` drops it."""
Load = Callable[[Path, Signature, Runtime], "LoadedModel"]
"""Loads the files of a folder. `ConversionError` where the runtime refuses, or runs otherwise."""
ReadStamp = Callable[[Path], dict[str, str]]
"""Reads the stamp out of the files; empty where there is none. `ArtifactError` if unreadable."""


Equipment = Callable[[], Mapping[str, str]]
"""What of a machine decides the result; `ConversionError` says what is missing to build there."""


def no_equipment() -> Mapping[str, str]:
    """Nothing beyond the packages: it is built everywhere, and the same everywhere."""
    return {}


@dataclass(frozen=True)
class Target:
    """One form that a program can be converted into."""

    name: str
    format: str
    precision: str
    hardware: tuple[str, ...]
    """Kinds of machine it is built for: it is timed, and may be kept, on these alone."""
    build: Build
    load: Load
    read_stamp: ReadStamp | None = None
    """None where the format has no room for a stamp: `stamp.json` then lies beside the files."""
    made_from: tuple[str, ...] = ()
    needs_calibration: bool = False
    settings: tuple[str, ...] = ()
    """Names of the settings in `ConversionConfig` that decide the result."""
    packages: tuple[str, ...] = ()
    """Packages whose version decides the result."""
    equipment: Equipment = no_equipment
    """Asked before each build; what cannot be built here is not a result that is kept."""

    def is_for(self, hardware_class: str) -> bool:
        """Whether a machine of this class is what the target is built for.

        A class may be told closer after a hyphen: `cpu-arm` is a `cpu`.
        """
        return hardware_class.split("-")[0] in self.hardware
