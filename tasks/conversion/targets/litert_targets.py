"""LiteRT (TensorFlow Lite's successor), for processors of small devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts.conversion import Signature
from tasks.conversion.targets.interface import BuildRequest, Runtime, Target

if TYPE_CHECKING:
    from tasks.conversion.targets.runtimes import LoadedModel


def _build(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.litert import write_litert

    return write_litert(request, folder)


def _load(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    from tasks.conversion.targets.litert import load_litert

    return load_litert(folder, signature, runtime)


def _equipment() -> Mapping[str, str]:
    from tasks.conversion.targets.litert import equipment

    return equipment()


LITERT_FP32 = Target(
    name="litert-fp32",
    format="litert",
    precision="fp32",
    hardware=("cpu",),
    build=_build,
    load=_load,
    equipment=_equipment,
)
