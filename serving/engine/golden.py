"""Golden batches: fixed rows whose answers every variant of a version has to give before it serves.

    python -m serving.engine.golden PROGRAM TARGET [ROWS]    (the version in JSON as input)

The rows come from a configured file, or are made of the signature with a fixed seed. What they have
to be answered is computed once by the registered program itself, and kept in a file named by the
program's digest. PyTorch takes 150 MB and seconds to import, so that is done by a process of its
own, which ends.
"""

import io
import logging
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.interfaces import Array
from tasks.contracts.conversion import BATCH_AXIS, TensorSpec
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.kinds.tabular import TABULAR, score_distances
from tasks.conversion.kinds.tensors import LEAST_SPREAD, spread_distances, spread_of
from tasks.conversion.kinds.text_embedding import TEXT_EMBEDDING, embedding_distances
from tasks.conversion.targets.interface import LoadedModel, Runtime, first_line_of
from tasks.kernel.errors import ArtifactError, ConversionError, FalajError, StorageError
from tasks.kernel.files import digest_of, write_atomically
from tasks.kernel.settings import PROJECT_ROOT

logger = logging.getLogger(__name__)
LIMIT_S = 600.0
"""For PyTorch's import and some dozens of rows, on a machine that is very busy."""
FLOOR = 1e-6
ROWS = (1, 7, 32)
"""Of the calls of a golden batch."""
LENGTHS = (5, 3, 8)
"""Of an axis of any length, in these calls."""
MOST_ROWS = 64
"""Taken of a configured file."""
HIGHEST = (30_000, 1_000, 50, 8, 1)
"""Whole numbers are below the first of these that the program takes."""
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
        [sys.executable, "-m", "serving.engine.golden", *files],
        input=program.model_dump_json(),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
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
        if program.columns is None or program.columns.task != "regression":
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


def _write(file: Path, golden: Golden) -> None:
    """Keep a golden batch.

    Raises:
        StorageError: the disk refused.
    """
    arrays: dict[str, Array] = {}
    for number, (call, expected) in enumerate(zip(golden.calls, golden.expected, strict=True)):
        arrays |= {f"{number}/in/{name}": array for name, array in call.items()}
        arrays[f"{number}/out"] = expected
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    write_atomically(file, stream.getvalue())


def _read(file: Path) -> Golden | None:
    """What the file holds; None where there is none, or an array is not what its checksum says."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive:
            arrays = dict(archive)
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, ValueError, EOFError) as exc:
        logger.warning("%s is damaged (%s): its golden answers are computed again", file, exc)
        return None
    calls: dict[str, Call] = {}
    for name, array in arrays.items():
        number, _, column = name.partition("/in/")
        if column:
            calls.setdefault(number, {})[column] = array
    return Golden(tuple(calls.values()), tuple(arrays[f"{number}/out"] for number in calls))


def answer_golden_rows(program: RegisteredProgram, path: Path, rows: Path | None) -> Golden:
    """Golden rows and what the program answers.

    Raises:
        ConversionError: the program answers nothing that can be compared.
        ArtifactError: the program or the rows cannot be read.
    """
    from tasks.conversion.targets.pytorch import load_pytorch  # imports PyTorch

    model = load_pytorch(path, program.signature, Runtime())
    return _answered_rows(model, rows) if rows else _made(program, path, model)


def _made(program: RegisteredProgram, path: Path, model: LoadedModel) -> Golden:
    """Rows that the program answers with numbers, of as wide a range as it takes."""
    known = _known_codes(path) if program.family == TABULAR.name else np.empty(0, np.int64)
    problem: Exception | None = None
    for highest in HIGHEST:
        maker = _Maker(program, known, highest, np.random.default_rng(0))
        calls = tuple(maker.call(*sizes) for sizes in zip(ROWS, LENGTHS, strict=True))
        try:
            expected = tuple(model(call) for call in calls)
        except (ConversionError, IndexError, RuntimeError) as exc:
            problem = exc
            continue
        if all(np.isfinite(answers).all() for answers in expected):
            return Golden(calls, expected)
    raise ConversionError(
        f"{program.version.name} version {program.version.version} answers none of the golden rows "
        f"that were made for it ({problem or 'its answers are no numbers'}); name a file with rows "
        "that it takes as golden_rows of the model"
    )


@dataclass(frozen=True)
class _Maker:
    """Makes inputs such as a program takes: whole numbers up to the highest, or known ones."""

    program: RegisteredProgram
    known: NDArray[np.int64]
    highest: int
    rng: np.random.Generator

    def call(self, rows: int, length: int) -> Call:
        """Inputs of so many rows; axes of any length are of this one."""
        made: Call = {}
        for spec in self.program.signature.inputs:
            shape = []
            for axis in spec.shape:
                wanted = axis if isinstance(axis, int) else rows if axis == BATCH_AXIS else length
                shape.append(min(wanted, self.program.signature.largest.get(str(axis), wanted)))
            made[spec.name] = self._values(spec, tuple(shape))
        return made

    def _values(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        rng = self.rng
        if spec.dtype == "float32":
            values = rng.normal(size=shape) * 10.0 ** rng.integers(-1, 4, shape)
            if self.program.family == TABULAR.name:
                values[rng.random(shape) < 0.1] = np.nan  # means missing
            return values.astype(np.float32)
        if spec.dtype == "bool" or "mask" in spec.name:
            return self._mask(shape).astype(spec.dtype)
        highest = min(self.highest, 255) if spec.dtype == "uint8" else self.highest
        whole = rng.integers(0, highest + 1, shape)
        if len(self.known):
            is_known = rng.random(shape) < 0.7
            whole[is_known] = rng.choice(self.known, int(is_known.sum()))
        return whole.astype(spec.dtype)

    def _mask(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """The first of each row are taken, at least one."""
        width = shape[-1] if len(shape) > 1 else 1
        taken = self.rng.integers(1, width + 1, (*shape[:-1], 1) if len(shape) > 1 else shape)
        return np.asarray(np.arange(width) < taken if len(shape) > 1 else taken > 0)


def _known_codes(path: Path) -> NDArray[np.int64]:
    """Whole numbers that the program holds: among them the codes of its categories."""
    from tasks.conversion.targets.pytorch import load_program

    tensors = load_program(path).buffers()
    whole = [t.numpy().ravel() for t in tensors if not t.is_floating_point() and t.dim() == 1]
    found = np.unique(np.concatenate([np.empty(0, np.int64), *(w.astype(np.int64) for w in whole)]))
    return found[(found >= 0) & (found < 2**31)]


def _answered_rows(model: LoadedModel, rows: Path) -> Golden:
    signature = model.signature
    most = min(MOST_ROWS, signature.largest.get(BATCH_AXIS, MOST_ROWS))
    try:
        with np.load(io.BytesIO(rows.read_bytes()), allow_pickle=False) as archive:
            call = {spec.name: _as(archive[spec.name][:most], spec) for spec in signature.inputs}
        answers = model(call)
    except Exception as exc:  # of an archive or a model that somebody else made
        names = ", ".join(spec.name for spec in signature.inputs)
        raise ArtifactError(
            f"{rows} cannot be used as golden rows ({first_line_of(exc)}); expected a NumPy "
            f"archive (.npz) with the arrays {names}, rows first, that the program takes"
        ) from exc
    if not len(answers) or not np.isfinite(answers).all():
        raise ArtifactError(
            f"the program answers no number to some of the golden rows of {rows}, or finds none, "
            "so no variant can be compared on them; name a file with rows that it answers"
        )
    return Golden((call,), (answers,))


def _as(array: Array, spec: TensorSpec) -> Array:
    """The array in the type of an input; whole numbers stay what they are."""
    if array.dtype.kind in "biuf":
        cast = np.ascontiguousarray(array, spec.dtype)
        if cast.dtype.kind == "f" or np.array_equal(cast, array):
            return cast
    raise ValueError(f"{spec.name} is {array.dtype} and does not fit {spec.dtype}")


def main(program: str, target: str, rows: str = "") -> int:
    """Answer golden rows; a failure is a line on standard error, exit code 1."""
    try:
        registered = RegisteredProgram.model_validate_json(sys.stdin.read())
        golden = answer_golden_rows(registered, Path(program), Path(rows) if rows else None)
        _write(Path(target), golden)
    except FalajError as exc:
        sys.stderr.write(f"\n{' '.join(str(exc).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
