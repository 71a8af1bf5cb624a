"""OpenVINO IR, for processors: in floats, and with weights or matrix products in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts.conversion import Signature
from tasks.conversion.processor import bf16_equipment, int8_equipment
from tasks.conversion.targets.interface import BuildRequest, Runtime, Target
from tasks.conversion.targets.onnx_targets import ONNX_FP32

if TYPE_CHECKING:
    from tasks.conversion.targets.runtimes import LoadedModel


def _build_floats(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.openvino import write_openvino

    return write_openvino(request, folder, ONNX_FP32.name)


def _build_int8(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.openvino_quantization import write_int8

    return write_int8(request, folder, OPENVINO_FP32.name)


def _build_weights_int8(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.openvino_quantization import write_weights_int8

    return write_weights_int8(request, folder, OPENVINO_FP32.name)


def _load_f32(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    from tasks.conversion.targets.runtimes import load_openvino

    return load_openvino(folder, signature, runtime)


def _load_bf16(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    from tasks.conversion.targets.runtimes import load_openvino

    return load_openvino(folder, signature, runtime, precision="bf16")


def _read_stamp(folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.openvino import read_stamp

    return read_stamp(folder)


OPENVINO_FP32 = Target(
    name="openvino-fp32",
    format="openvino",
    precision="fp32",
    hardware=("cpu",),
    build=_build_floats,
    load=_load_f32,
    read_stamp=_read_stamp,
    made_from=(ONNX_FP32.name,),
    packages=("openvino",),
)

# The file holds 32-bit weights; OpenVINO rounds them when it loads it, told to or not.
OPENVINO_BF16 = Target(
    name="openvino-bf16",
    format="openvino",
    precision="bf16",
    hardware=("cpu",),
    build=_build_floats,
    load=_load_bf16,
    read_stamp=_read_stamp,
    made_from=(ONNX_FP32.name,),
    packages=("openvino",),
    equipment=bf16_equipment,
)

OPENVINO_WEIGHTS_INT8 = Target(
    name="openvino-weights-int8",
    format="openvino",
    precision="weights-int8",
    hardware=("cpu",),
    build=_build_weights_int8,
    load=_load_f32,
    read_stamp=_read_stamp,
    made_from=(OPENVINO_FP32.name,),
    packages=("openvino", "nncf"),
)

OPENVINO_INT8 = Target(
    name="openvino-int8",
    format="openvino",
    precision="int8",
    hardware=("cpu",),
    build=_build_int8,
    load=_load_f32,
    read_stamp=_read_stamp,
    made_from=(OPENVINO_FP32.name,),
    needs_calibration=True,
    settings=("calibration_rows", "seed", "quantized_layers"),
    packages=("openvino", "nncf"),
    equipment=int8_equipment,
)
