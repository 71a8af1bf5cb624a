"""Provenance metadata: what each variant carries in its own files, to be traced and checked.

It is written as the last step of a build and read back. Nothing is loaded whose files carry other
values than their record: see `tasks.conversion.loading`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tasks.contracts.release import RegisteredProgram
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.registry import converter_of
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import content_key

FEWEST_CALIBRATING_ROWS = 8


def identity(made: Format, program: RegisteredProgram) -> dict[str, str]:
    """What every variant of this format and program carries, whenever it was built."""
    return {
        "target": made.name,
        "precision": made.precision,
        "program_sha256": program.program.sha256,
        "snapshot_sha256": program.version.snapshot_sha256,
        "schema_digest": schema_digest(program),
    }


def full_provenance(
    made: Format, program: RegisteredProgram, sample: Iterable[ModelInputs]
) -> dict[str, str]:
    """The identity, the library versions of the build, and the calibrating calls."""
    versions = ", ".join(f"{name} {v}" for name, v in library_versions(made).items())
    values = {**identity(made, program), "versions": versions or "none"}
    if made.needs_calibration:
        calls = tuple(sample)
        values["calibration_rows"] = str(sum(call.num_rows for call in calls))
        values["calibration_sha256"] = digest_of_inputs(calls)
    return values


def digest_of_inputs(calls: Iterable[ModelInputs]) -> str:
    """SHA-256 over names, types, shapes and values of all arrays, in the order of the calls."""
    digest = hashlib.sha256()
    for call in calls:
        for name, array in call.items():
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def check_sample(sample: Iterable[ModelInputs]) -> None:
    """Refuse calibrating rows that show no range of values.

    A missing number is a value like any other, but a row in which every number is missing shows
    nothing, and the ranges of a few rows hold for these rows alone.

    Raises:
        ConversionError: there are fewer usable rows than a quantiser needs.
    """
    total, usable = 0, 0
    for call in sample:
        floats = [array for array in call.values() if np.issubdtype(array.dtype, np.floating)]
        known = np.full(call.num_rows, not floats)
        for array in floats:
            known |= np.isfinite(array).any(axis=tuple(range(1, array.ndim)))
        total += call.num_rows
        usable += int(np.count_nonzero(known))
    if usable < FEWEST_CALIBRATING_ROWS:
        raise ConversionError(
            f"{total} rows calibrate it, {usable} of them with a number at all; expected at least "
            f"{FEWEST_CALIBRATING_ROWS} such rows. Raise conversion.calibration_rows, or mend the "
            "rows"
        )


def schema_digest(program: RegisteredProgram) -> str:
    """Digest of what the program takes, in its order: its raw columns, else its tensors."""
    return content_key(program.signature if program.columns is None else program.columns)


def library_versions(made: Format) -> dict[str, str]:
    """Installed versions of the packages that decide the files."""
    return {package: version(package) for package in made.packages}


def check_provenance(made: Format, folder: Path, expected: Mapping[str, str]) -> None:
    """Refuse files that do not carry what is expected of them.

    Args:
        made: the format that they should be of.
        folder: holds them.
        expected: each of these is in their provenance, with this value.

    Raises:
        ArtifactError: they have none, or another one.
    """
    seen = converter_of(made).read_provenance(folder)
    if not seen:
        raise ArtifactError(
            f"the files of {made.name} carry no provenance metadata, so they are not loaded; "
            "convert the model again"
        )
    for name in expected:
        if seen.get(name) != expected[name]:
            raise ArtifactError(
                f"the files of {made.name} have the {name} {_short(seen.get(name))}, expected "
                f"{_short(expected[name])}: they belong to another model, snapshot or build, and "
                "are not loaded. Convert the model again"
            )


def _short(value: str | None) -> str:
    return "nothing" if value is None else repr(value if len(value) < 40 else f"{value[:12]}...")
