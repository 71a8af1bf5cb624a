"""Answers of golden rows, computed by the registered program itself in a process of its own.

    python -m serving.engine.golden_rows PROGRAM TARGET [ROWS]    (the version in JSON as input)

PyTorch takes 150 MB and seconds to import; a process that serves other forms does without.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.engine.golden import Call, Golden, write_golden
from serving.interfaces import Array
from tasks.contracts.conversion import BATCH_AXIS, TensorSpec
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.targets.interface import LoadedModel, Runtime, first_line_of
from tasks.conversion.targets.pytorch import load_program, load_pytorch
from tasks.kernel.errors import ArtifactError, ConversionError, FalajError

ROWS = (1, 7, 32)
"""Of the calls of a golden batch."""
LENGTHS = (5, 3, 8)
"""Of an axis of any length, in these calls."""
MOST_ROWS = 64
"""Taken of a configured file."""
HIGHEST = (30_000, 1_000, 50, 8, 1)
"""Whole numbers are below the first of these that the program takes."""


def answer_golden_rows(program: RegisteredProgram, path: Path, rows: Path | None) -> Golden:
    """Golden rows and what the program answers.

    Raises:
        ConversionError: the program answers nothing that can be compared.
        ArtifactError: the program or the rows cannot be read.
    """
    model = load_pytorch(path, program.signature, Runtime())
    return _answered_rows(model, rows) if rows else _made(program, path, model)


def _made(program: RegisteredProgram, path: Path, model: LoadedModel) -> Golden:
    """Rows that the program answers with numbers, of as wide a range as it takes."""
    known = _known_codes(path) if program.family == TABULAR.name else np.empty(0, np.int64)
    problem: Exception | None = None
    for highest in HIGHEST:
        rng = np.random.default_rng(0)
        calls = tuple(
            _call(program, rows, length, highest, known, rng)
            for rows, length in zip(ROWS, LENGTHS, strict=True)
        )
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


def _call(
    program: RegisteredProgram,
    rows: int,
    length: int,
    highest: int,
    known: NDArray[np.int64],
    rng: np.random.Generator,
) -> Call:
    made: Call = {}
    for spec in program.signature.inputs:
        shape = []
        for axis in spec.shape:
            wanted = axis if isinstance(axis, int) else rows if axis == BATCH_AXIS else length
            shape.append(min(wanted, program.signature.largest.get(str(axis), wanted)))
        made[spec.name] = _values(program.family, spec, tuple(shape), highest, known, rng)
    return made


def _values(
    family: str,
    spec: TensorSpec,
    shape: tuple[int, ...],
    highest: int,
    known: NDArray[np.int64],
    rng: np.random.Generator,
) -> Array:
    if spec.dtype == "float32":
        values = rng.normal(size=shape) * 10.0 ** rng.integers(-1, 4, shape)
        if family == TABULAR.name:
            values[rng.random(shape) < 0.1] = np.nan  # means missing
        return values.astype(np.float32)
    if spec.dtype == "bool" or "mask" in spec.name:
        return _mask(shape, rng).astype(spec.dtype)
    highest = min(highest, 255) if spec.dtype == "uint8" else highest
    whole = rng.integers(0, highest + 1, shape)
    if len(known):
        is_known = rng.random(shape) < 0.7
        whole[is_known] = rng.choice(known, int(is_known.sum()))
    return whole.astype(spec.dtype)


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.bool_]:
    """The first of each row are taken, at least one."""
    width = shape[-1] if len(shape) > 1 else 1
    taken = rng.integers(1, width + 1, (*shape[:-1], 1) if len(shape) > 1 else shape)
    return np.asarray(np.arange(width) < taken if len(shape) > 1 else taken > 0)


def _known_codes(path: Path) -> NDArray[np.int64]:
    """Whole numbers that the program holds: among them the codes of its categories."""
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
        write_golden(Path(target), golden)
    except FalajError as exc:
        sys.stderr.write(f"\n{' '.join(str(exc).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
