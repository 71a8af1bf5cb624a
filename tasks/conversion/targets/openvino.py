"""ONNX to OpenVINO IR, weights in 32-bit floats, and OpenVINO without its usage reporting."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.conversion.provenance import STAMP_PREFIX
from tasks.conversion.targets.interface import BuildRequest
from tasks.conversion.targets.onnx import MODEL_FILE as ONNX_FILE
from tasks.conversion.variants import sentence_of
from tasks.kernel.errors import ArtifactError, ConversionError, StorageError

MODEL_FILE = "model.xml"
MODEL_NAME = "falaj"
_COUNTED_NAME = re.compile(r"[A-Za-z]+_\d+")


def without_reporting(name: str) -> Any:
    """Import `openvino` or `nncf` so that it reports nothing to anyone, and changes no logging.

    Both send an event to an analytics service when they are imported or used, unless a file in the
    home folder says no. Both do without where their reporting package cannot be imported; a module
    that is None in `sys.modules` is one that cannot. NNCF makes its own class that of every logger
    created later; that is put back.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    logger_class = logging.getLoggerClass()
    module = importlib.import_module(name)
    logging.setLoggerClass(logger_class)
    return module


def write_openvino(request: BuildRequest, folder: Path, source: str) -> dict[str, str]:
    """Convert the ONNX form `source` to OpenVINO IR, weights kept in 32-bit floats.

    From ONNX and not from PyTorch, because only that way keeps input names and shapes.

    Raises:
        ConversionError: the ONNX form was not built, or OpenVINO lacks one of its operators.
        ArtifactError: the ONNX form is absent or damaged.
        StorageError: the disk refused a write.
    """
    model = convert_onnx(request.source_folder(source) / ONNX_FILE)
    save_ir(model, folder, request.stamp)
    return {"made_from": source}


def convert_onnx(path: Path) -> Any:
    """The `openvino.Model` of an ONNX file.

    Raises:
        ConversionError: OpenVINO has no form of one of its operators.
    """
    ov = without_reporting("openvino")
    refusals = tuple(getattr(ov.frontend, name) for name in _FRONTEND_FAILURES)
    try:
        return ov.convert_model(path)
    except (RuntimeError, *refusals) as exc:
        reason = " ".join(str(exc).split("Summary:")[-1].split())[:400]
        raise ConversionError(
            f"OpenVINO cannot convert the ONNX form: {reason}. The ONNX form serves meanwhile"
        ) from exc


_FRONTEND_FAILURES = (
    "GeneralFailure",
    "InitializationFailure",
    "NotImplementedFailure",
    "OpConversionFailure",
    "OpValidationFailure",
)


def save_ir(model: Any, folder: Path, values: Mapping[str, str]) -> None:
    """Stamp a model and write it as `model.xml` and `model.bin`, weights as they are.

    Raises:
        StorageError: the disk refused the write. OpenVINO reports that as a `RuntimeError`.
    """
    ov = without_reporting("openvino")
    for name, value in sorted(values.items()):
        model.set_rt_info(value, [STAMP_PREFIX, name])
    _name_by_position(model)
    try:
        ov.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)
    except RuntimeError as exc:
        raise StorageError(
            f"{folder}: OpenVINO could not write the model ({sentence_of(exc)}); expected a "
            "writable folder with free space. Nothing half written is visible; free space and run "
            "again, finished stages are kept"
        ) from exc


def _name_by_position(model: Any) -> None:
    """Replace names that OpenVINO counts up in a process: equal models are equal files then."""
    model.set_friendly_name(MODEL_NAME)
    for position, operation in enumerate(model.get_ordered_ops()):
        if _COUNTED_NAME.fullmatch(operation.get_friendly_name()):
            operation.set_friendly_name(f"{operation.get_type_name()}_{position}")


def read_ir(folder: Path) -> Any:
    """The `openvino.Model` of a folder written by `save_ir`."""
    return without_reporting("openvino").Core().read_model(folder / MODEL_FILE)


def read_stamp(folder: Path) -> dict[str, str]:
    """The stamp of the model in a folder; empty where it has none.

    Raises:
        ArtifactError: there is no readable model.
    """
    try:
        model = read_ir(folder)
    except RuntimeError as exc:
        raise ArtifactError(
            f"{MODEL_FILE} cannot be read as an OpenVINO model ({sentence_of(exc)}); build the "
            "variant again"
        ) from exc
    if not model.has_rt_info([STAMP_PREFIX]):
        return {}
    values: dict[str, Any] = model.get_rt_info([STAMP_PREFIX]).value
    return {name: str(value) for name, value in values.items()}
