"""What each form carries in its own files, so that it can be traced and checked by itself.

The stamp is written as the last step of a build and read back. Nothing is loaded whose files do not
say what their record says: see `tasks.conversion.loading`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tasks.contracts.release import RegisteredProgram
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.targets.interface import Target
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import content_key

STAMP_PREFIX = "falaj"
STAMP_FILE = "stamp.json"
FEWEST_CALIBRATING_ROWS = 8


def identity(target: Target, program: RegisteredProgram) -> dict[str, str]:
    """What every form of this target and program says of itself, whenever it was built."""
    return {
        "target": target.name,
        "precision": target.precision,
        "program_sha256": program.program.sha256,
        "snapshot_sha256": program.version.snapshot_sha256,
        "schema_digest": schema_digest(program),
    }


def full_stamp(
    target: Target, program: RegisteredProgram, sample: Iterable[ModelInputs] | None
) -> dict[str, str]:
    """The identity, the library versions that the form was built with, and what calibrated it.

    Args:
        target: the form.
        program: its source.
        sample: the calibrating calls; None where the target takes none.
    """
    versions = ", ".join(f"{name} {v}" for name, v in library_versions(*target.packages).items())
    stamped = {**identity(target, program), "versions": versions or "none"}
    if sample is None:
        return stamped
    calls = tuple(sample)
    return {
        **stamped,
        "calibration_rows": str(sum(call.num_rows for call in calls)),
        "calibration_sha256": digest_of_inputs(calls),
    }


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
        total += call.num_rows
        usable += int(np.count_nonzero(_rows_with_a_number(call)))
    if usable < FEWEST_CALIBRATING_ROWS:
        raise ConversionError(
            f"{total} rows calibrate it, {usable} of them with a number at all; expected at least "
            f"{FEWEST_CALIBRATING_ROWS} such rows. Raise conversion.calibration_rows, or mend the "
            "rows; the forms that need no calibration serve meanwhile"
        )


def _rows_with_a_number(call: ModelInputs) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    floats = [array for array in call.values() if np.issubdtype(array.dtype, np.floating)]
    known = np.full(call.num_rows, not floats)
    for array in floats:
        known |= np.isfinite(array).any(axis=tuple(range(1, array.ndim)))
    return known


def schema_digest(program: RegisteredProgram) -> str:
    """Digest of what the program takes, in its order: its raw columns, else its tensors.

    Who serves a variant compares it with that of its own requests.
    """
    return content_key(program.signature if program.columns is None else program.columns)


def library_versions(*packages: str) -> dict[str, str]:
    """Installed versions, for stamps, keys and settings."""
    return {package: version(package) for package in packages}


def write_beside(folder: Path, values: Mapping[str, str]) -> None:
    """Put the stamp beside the files of a format that has no room for it."""
    (folder / STAMP_FILE).write_text(json.dumps(dict(values), indent=1, sort_keys=True))


def read_stamp(target: Target, folder: Path) -> dict[str, str]:
    """The stamp that the files of a folder carry; empty where they carry none.

    Raises:
        ArtifactError: the files cannot be read as this format.
    """
    if target.read_stamp is not None:
        return target.read_stamp(folder)
    try:
        values = json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ArtifactError(
            f"{target.name}: {STAMP_FILE} cannot be read ({exc}); build the variant again"
        ) from exc
    return {str(name): str(value) for name, value in dict(values).items()}


def check_stamp(target: Target, folder: Path, expected: Mapping[str, str]) -> None:
    """Refuse files that do not say of themselves what is expected of them.

    Args:
        target: the form that they should be.
        folder: holds them.
        expected: each of these is in the stamp, with this value.

    Raises:
        ArtifactError: there is no stamp, or it says something else.
    """
    seen = read_stamp(target, folder)
    if not seen:
        raise ArtifactError(
            f"the files of {target.name} carry no stamp that says what they were made from, so "
            "they are not loaded; convert the model again"
        )
    other = [name for name in expected if seen.get(name) != expected[name]]
    if other:
        name = other[0]
        raise ArtifactError(
            f"the files of {target.name} say {_shown(seen.get(name))} for {name}, expected "
            f"{_shown(expected[name])}: they belong to another model, snapshot or build, and are "
            "not loaded. Convert the model again"
        )


def _shown(value: str | None) -> str:
    return "nothing" if value is None else repr(value if len(value) < 40 else f"{value[:12]}...")
