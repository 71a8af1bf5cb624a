"""TensorRT engines, for graphics processors; each is as precise as its ONNX form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts.conversion import Signature
from tasks.conversion.targets.interface import BuildRequest, Runtime, Target
from tasks.conversion.targets.onnx_targets import ONNX_FP16, ONNX_INT8

if TYPE_CHECKING:
    from tasks.conversion.targets.runtimes import LoadedModel


def _build_fp16(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.tensorrt import write_engine

    return write_engine(request, folder, ONNX_FP16.name)


def _build_int8(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.tensorrt import write_engine

    return write_engine(request, folder, ONNX_INT8.name)


def _load(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    from tasks.conversion.targets.tensorrt import load_engine

    return load_engine(folder, signature, runtime)


def _equipment() -> Mapping[str, str]:
    from tasks.conversion.targets.tensorrt import equipment

    return equipment()


TENSORRT_FP16 = Target(
    name="tensorrt-fp16",
    format="tensorrt",
    precision="fp16",
    hardware=("gpu",),
    build=_build_fp16,
    load=_load,
    made_from=(ONNX_FP16.name,),
    settings=("engine_rows", "batch_sizes"),
    equipment=_equipment,
)

TENSORRT_INT8 = Target(
    name="tensorrt-int8",
    format="tensorrt",
    precision="int8",
    hardware=("gpu",),
    build=_build_int8,
    load=_load,
    made_from=(ONNX_INT8.name,),
    settings=("engine_rows", "batch_sizes"),
    equipment=_equipment,
)
