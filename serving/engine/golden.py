"""Golden batches: fixed rows whose answers every form of a version has to give before it serves.

The rows come from a configured file, or are made of the signature with a fixed seed. What they have
to be answered is computed once by the registered program itself, in PyTorch, and kept in a file
named by the program's digest; another file beside it pins the digest of that one.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.interfaces import Array
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.kinds.tabular import TABULAR, score_distances
from tasks.conversion.kinds.tensors import LEAST_SPREAD, spread_distances, spread_of
from tasks.conversion.kinds.text_embedding import TEXT_EMBEDDING, embedding_distances
from tasks.conversion.targets.interface import LoadedModel
from tasks.kernel.errors import ArtifactError, ConversionError, FalajError, StorageError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import PROJECT_ROOT

logger = logging.getLogger(__name__)
LIMIT_S = 600.0
"""For PyTorch's import and some dozens of rows, on a machine that is very busy."""
ERRORS: dict[str, type[FalajError]] = {
    kind.__name__: kind for kind in (ArtifactError, ConversionError, StorageError)
}
FLOOR = 1e-6
Call = dict[str, Array]


@dataclass(frozen=True)
class Golden:
    """Calls and what the program answers to them."""

    calls: tuple[Call, ...]
    expected: tuple[Array, ...]

    @property
    def probe(self) -> Call:
        """One row, to ask a backend whether it is well."""
        return {name: array[:1] for name, array in self.calls[0].items()}


def golden_batch(
    program: RegisteredProgram, path: Path, folder: Path, rows: Path | None = None
) -> Golden:
    """The golden batch of a version, from its file where that is whole.

    Args:
        program: the version.
        path: of its program, checked by digest.
        folder: takes the file.
        rows: NumPy archive with rows for every input; None makes some.

    Raises:
        ConversionError: the program answers nothing that can be compared.
        ArtifactError: the program or the rows cannot be read.
        StorageError: the disk refused.
    """
    given = "" if rows is None else "-" + hashlib.sha256(_bytes_of(rows)).hexdigest()[:12]
    file = folder / program.version.name / f"{program.version.program_sha256}{given}.npz"
    kept = _read(file)
    if kept is not None:
        return kept
    _compute(program, path, file, rows)
    made = _read(file)
    if made is None:
        raise StorageError(f"{file} was written and cannot be read; look at the disk")
    return made


def _compute(program: RegisteredProgram, path: Path, file: Path, rows: Path | None) -> None:
    """Have the answers computed and written by a process that ends and takes PyTorch with it."""
    asked = {
        "program": program.model_dump(mode="json"),
        "path": str(path),
        "file": str(file),
        "rows": None if rows is None else str(rows),
    }
    done = subprocess.run(
        [sys.executable, "-m", "serving.engine.golden_rows"],
        input=json.dumps(asked),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode == 0:
        return
    try:
        told = json.loads(done.stdout)
        kind, message = ERRORS[told["kind"]], str(told["message"])
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines()
        kind, message = (
            ConversionError,
            (
                f"the golden answers of {program.version.name} version {program.version.version} "
                f"could not be computed (exit code {done.returncode}): "
                f"{said[-1] if said else 'no word'}"
            ),
        )
    raise kind(message)


def gap(golden: Golden, model: LoadedModel, program: RegisteredProgram) -> float:
    """Largest gap between a form's golden answers and the program's, as conversion measures it.

    Raises:
        ConversionError: the form cannot answer, or answers something that is no number.
    """
    reference = np.concatenate([answer.reshape(len(answer), -1) for answer in golden.expected])
    largest = 0.0
    for call, expected in zip(golden.calls, golden.expected, strict=True):
        answers = model(call)
        if answers.shape != expected.shape or not np.isfinite(answers).all():
            raise ConversionError(
                f"its golden answers have shape {answers.shape} and may not be numbers, expected "
                f"{expected.shape}"
            )
        largest = max(largest, float(_distances(program, reference, expected, answers).max()))
    return largest


def _distances(
    program: RegisteredProgram, reference: Array, expected: Array, answers: Array
) -> NDArray[np.floating[Any]]:
    if program.family == TEXT_EMBEDDING.name:
        return embedding_distances(expected, answers)
    if program.family == TABULAR.name:
        if program.columns is None or program.columns.task == "classification":
            return score_distances(expected, answers)
        spread, centre = float(reference.std()), float(reference.mean())
        return score_distances(expected, answers, max(spread, FLOOR, 0.1 * abs(centre)), centre)
    rows, unit = len(expected), spread_of(reference, apart=True)
    unit = np.maximum(unit, np.maximum(FLOOR, LEAST_SPREAD * np.abs(reference).max()))
    if reference.shape[1] != expected[:1].size:  # answers with an axis of any length
        unit = np.full(expected[:1].size, unit.max())
    return spread_distances(expected.reshape(rows, -1), answers.reshape(rows, -1), unit)


def _bytes_of(rows: Path) -> bytes:
    try:
        return rows.read_bytes()
    except OSError as exc:
        raise ArtifactError(
            f"golden rows {rows} cannot be read ({exc.strerror}); name another file, or none"
        ) from exc


def write_golden(file: Path, golden: Golden) -> None:
    """Keep a golden batch, and the digest of its file beside it.

    Raises:
        StorageError: the disk refused.
    """
    arrays: dict[str, Array] = {}
    for number, (call, expected) in enumerate(zip(golden.calls, golden.expected, strict=True)):
        arrays |= {f"{number}/in/{name}": array for name, array in call.items()}
        arrays[f"{number}/out"] = expected
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    content = stream.getvalue()
    write_atomically(file, content)
    write_atomically(_pin(file), hashlib.sha256(content).hexdigest().encode())


def _read(file: Path) -> Golden | None:
    """What the file holds; None where there is none, or it is not what its pin says."""
    try:
        content, pinned = file.read_bytes(), _pin(file).read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    if hashlib.sha256(content).hexdigest() != pinned:
        logger.warning("%s is damaged: its golden answers are computed anew", file)
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return _unpacked(archive)


def _unpacked(archive: Mapping[str, Array]) -> Golden:
    numbers = range(sum(name.endswith("/out") for name in archive))
    calls = tuple(
        {
            name.split("/", 2)[2]: archive[name]
            for name in archive
            if name.startswith(f"{number}/in/")
        }
        for number in numbers
    )
    return Golden(calls, tuple(archive[f"{number}/out"] for number in numbers))


def _pin(file: Path) -> Path:
    return file.with_suffix(".sha256")
