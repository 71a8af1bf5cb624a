"""ONNX: the form that all others are made from, and its smaller forms for ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts.conversion import Signature
from tasks.conversion.processor import int8_equipment
from tasks.conversion.targets.interface import BuildRequest, Runtime, Target

if TYPE_CHECKING:
    from tasks.conversion.targets.runtimes import LoadedModel


def _build_fp32(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.onnx import write_onnx

    return write_onnx(request, folder)


def _build_fp16(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.onnx_halving import write_fp16

    return write_fp16(request, folder, ONNX_FP32.name)


def _build_int8(request: BuildRequest, folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.onnx_quantization import write_int8

    return write_int8(request, folder, ONNX_FP32.name)


def _load(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    from tasks.conversion.targets.runtimes import load_onnx

    return load_onnx(folder, signature, runtime)


def _load_fp16(folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    from tasks.conversion.targets.runtimes import load_onnx

    return load_onnx(folder, signature, runtime, precision="fp16")


def _read_stamp(folder: Path) -> dict[str, str]:
    from tasks.conversion.targets.onnx import read_stamp

    return read_stamp(folder)


ONNX_FP32 = Target(
    name="onnx-fp32",
    format="onnx",
    precision="fp32",
    hardware=("cpu", "gpu"),
    build=_build_fp32,
    load=_load,
    read_stamp=_read_stamp,
    settings=("opset",),
    packages=("torch", "onnx", "onnxscript"),
)

ONNX_FP16 = Target(
    name="onnx-fp16",
    format="onnx",
    precision="fp16",
    hardware=("gpu",),  # on processors ONNX Runtime computes it in 32 bits all the same
    build=_build_fp16,
    load=_load_fp16,
    read_stamp=_read_stamp,
    made_from=(ONNX_FP32.name,),
    packages=("onnx", "onnxruntime"),
)

ONNX_INT8 = Target(
    name="onnx-int8",
    format="onnx",
    precision="int8",
    hardware=("cpu", "gpu"),
    build=_build_int8,
    load=_load,
    read_stamp=_read_stamp,
    made_from=(ONNX_FP32.name,),
    needs_calibration=True,
    settings=("calibration_rows", "seed"),
    packages=("onnx", "onnxruntime"),
    equipment=int8_equipment,
)
