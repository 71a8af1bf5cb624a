"""Golden batches: fixed rows whose answers every form of a version has to give before it serves.

The rows come from a configured file, or are made of the signature with a fixed seed. What they have
to be answered is computed once by the registered program itself, in PyTorch, and kept in a file
named by the program's digest; another file beside it pins the digest of that one.
"""

from __future__ import annotations

import hashlib
import io
import logging
import subprocess
import sys
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
from tasks.kernel.errors import ArtifactError, ConversionError, StorageError
from tasks.kernel.files import digest_of, write_atomically
from tasks.kernel.settings import PROJECT_ROOT

logger = logging.getLogger(__name__)
LIMIT_S = 600.0
"""For PyTorch's import and some dozens of rows, on a machine that is very busy."""
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
        ConversionError: the program or the rows cannot be read, or it answers nothing that can be
            compared.
        ArtifactError: the rows are not there.
        StorageError: the disk refused.
    """
    given = "" if rows is None else "-" + _digest_of_rows(rows)
    file = folder / program.version.name / f"{program.version.program_sha256}{given}.npz"
    kept = _read(file)
    if kept is None:
        _compute(program, path, file, rows)
        kept = _read(file)
    if kept is None:
        raise StorageError(f"{file} was written and cannot be read; look at the disk")
    return kept


def _compute(program: RegisteredProgram, path: Path, file: Path, rows: Path | None) -> None:
    """Have the answers computed and written by a process that ends and takes PyTorch with it."""
    files = [str(path), str(file), *([str(rows)] if rows else [])]
    done = subprocess.run(
        [sys.executable, "-m", "serving.engine.golden_rows", *files],
        input=program.model_dump_json(),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise ConversionError(
            f"the golden answers of {program.version.name} version {program.version.version} could "
            f"not be computed: {(done.stderr.strip().splitlines() or ['no reason was given'])[-1]}"
        )


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


def _digest_of_rows(rows: Path) -> str:
    try:
        return digest_of(rows)[:12]
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
        calls: dict[str, Call] = {}
        for name in archive:
            number, _, column = name.partition("/in/")
            if column:
                calls.setdefault(number, {})[column] = archive[name]
        expected = tuple(archive[f"{number}/out"] for number in calls)
    return Golden(tuple(calls.values()), expected)


def _pin(file: Path) -> Path:
    return file.with_suffix(".sha256")
