"""Provenance metadata: what each variant carries in its own files, to be traced and checked.

It is written as the last step of a build and read back. Nothing is loaded whose files carry other
values than their record: see `tasks.conversion.variants`.

What this host's processor can compute is read here too. Products of 8-bit integers that are added
in 16 bits saturate: x86 adds so (`vpmaddubsw`) where it has no dot product of 8 bits (AVX512-VNNI,
AVX-VNNI, AMX-INT8). Weights of 7 bits never reach that limit. `ONEDNN_MAX_CPU_ISA` makes a host
pass for a lesser one, such as `AVX2`. OpenVINO heeds it and ONNX Runtime does not; here it counts
for both, and weights of 7 bits are right on every processor.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from tasks.contracts.release import RegisteredProgram
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.interface import ModelInputs, converter_of
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
    return {package: _installed_version(package) for package in made.packages}


def _installed_version(package: str) -> str:
    """That of a package or, where it is there instead, of its build for GPUs (onnxruntime-gpu)."""
    try:
        return version(package)
    except PackageNotFoundError:
        with suppress(PackageNotFoundError):
            return version(f"{package}-gpu")
        raise


def check_provenance(made: Format, folder: Path, *expected: Mapping[str, str]) -> None:
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
    for name, value in ((name, of[name]) for of in expected for name in of):
        if seen.get(name) != value:
            raise ArtifactError(
                f"the files of {made.name} have the {name} {_short(seen.get(name))}, expected "
                f"{_short(value)}: they belong to another model, snapshot or build, and are not "
                "loaded. Convert the model again"
            )


def _short(value: str | None) -> str:
    return "nothing" if value is None else repr(value if len(value) < 40 else f"{value[:12]}...")


CPU_INFO = Path("/proc/cpuinfo")
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Names of the variable; oneDNN reads the second where the first is not set."""
WEIGHT_BITS = "weight_bits"
"""Setting of an 8-bit variant: in how many bits its weights are."""
_DOT_PRODUCTS = {"avx512_vnni", "avx_vnni", "amx_int8"}
_BF16_PRODUCTS = {"avx512_bf16", "avx_ne_convert"}
_LEFT_BY = {
    **{name: set[str]() for name in ("SSE41", "AVX", "AVX2", "AVX512_CORE")},
    "AVX2_VNNI": {"avx_vnni"},
    "AVX2_VNNI_2": {"avx_vnni", "avx_ne_convert"},
    "AVX512_CORE_VNNI": {"avx_vnni", "avx512_vnni"},
}
"""What a limit leaves of these; limits above leave enough of them."""


def _products() -> set[str] | None:
    """Which of these this host has, within the limit of the environment; None where it is no x86.

    Such processors add 8-bit products in 32 bits.
    """
    lines = CPU_INFO.read_text().splitlines()
    listed = next((line for line in lines if line.startswith("flags")), None)
    if listed is None:
        return None
    flags = set(listed.split()) & (_DOT_PRODUCTS | _BF16_PRODUCTS)
    limit = next((value for name in LIMITS if (value := os.environ.get(name))), "").upper()
    return flags & _LEFT_BY.get(limit, flags)


def weight_bits() -> int:
    """Of an 8-bit variant's weights, so that its sums are right on this host: 7 or 8."""
    products = _products()
    return 8 if products is None or products & _DOT_PRODUCTS else 7


def computes_bf16() -> bool:
    """Whether this host multiplies in bfloat16."""
    return bool((_products() or set()) & _BF16_PRODUCTS)


def processor_equipment(made: Format) -> dict[str, str]:
    """What of the processor decides the files of a format.

    Raises:
        ConversionError: its precision is bfloat16, and this processor does not compute in it.
    """
    if made.precision == "bf16" and not computes_bf16():
        raise ConversionError(
            "this processor computes no bfloat16 (AVX512-BF16 or AVX-NE-CONVERT), so it would run "
            "in 32 bits; convert on a processor that has it"
        )
    return {WEIGHT_BITS: str(weight_bits())} if made.precision == "int8" else {}


def check_weight_bits(name: str, settings: Mapping[str, str]) -> None:
    """Refuse an 8-bit variant that was built for processors that do not saturate, on one that does.

    Raises:
        ConversionError: it is such a variant.
    """
    bits = weight_bits()
    if int(settings.get(WEIGHT_BITS, bits)) > bits:
        raise ConversionError(
            f"{name} has weights of 8 bits, for processors with an 8-bit dot product (VNNI). This "
            "one has none, and its sums would saturate; convert the model again on such a processor"
        )
