"""PyTorch program to ONNX: one file, opset pinned, any number of rows, the same bytes each time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch

from tasks.contracts.data import DatasetSchema
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.program import INPUT_NAMES, OUTPUT_NAME, check_inputs, load_program
from tasks.conversion.variants import (
    STAMP_PREFIX,
    build_variant,
    library_versions,
    sentence_of,
    stamp,
)
from tasks.errors import ConversionError
from tasks.settings import ArtifactStore

MODEL_FILE = "model.onnx"
BATCH_AXIS = "batch"


def build_onnx(
    program: RegisteredProgram, config: ConversionConfig, store: ArtifactStore
) -> BuiltVariant:
    """Convert the program to ONNX, in the artifact store.

    Returns:
        The variant; without files and with `failure` where the program has an operator that ONNX
        lacks, or the exported file does not pass the ONNX checker.

    Raises:
        ArtifactError: the program file is absent or damaged.
        StorageError: the disk refused a write.
    """
    versions = library_versions("torch", "onnx", "onnxscript")

    def convert(folder: Path) -> dict[str, str]:
        loaded = load_program(store.path(program.program))
        check_inputs(loaded, program.columns)
        model = export_onnx(loaded, config.opset)
        tidy(model)
        write_stamp(model, stamp("onnx-fp32", program))
        check_onnx(model, program.columns)
        (folder / MODEL_FILE).write_bytes(model.SerializeToString(deterministic=True))
        return {"opset": str(config.opset), **versions}

    decisive = (config.opset, versions)
    return build_variant("onnx-fp32", program, config, store, decisive, convert)


def export_onnx(program: torch.export.ExportedProgram, opset: int) -> onnx.ModelProto:
    """The program as an ONNX model with inputs `categorical`, `numeric` and output `score`.

    Raises:
        ConversionError: ONNX has no form of an operator of the program.
    """
    try:
        with _quiet_exporter():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=list(INPUT_NAMES),
                output_names=[OUTPUT_NAME],
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as exc:
        raise ConversionError(
            f"the program cannot be written as ONNX opset {opset}: {sentence_of(exc)}. Replace "
            "that operator in the network; the PyTorch program serves meanwhile"
        ) from exc
    assert exported is not None  # only without dynamo
    _keep_names_apart(exported.model.graph)
    return exported.model_proto


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without the exporter's notes on packages that are not needed and on torch's own code."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            yield
    finally:
        registration.setLevel(level)


def _keep_names_apart(graph: Any) -> None:
    """Rename inner values that share a name with an input or output of the graph.

    The exporter lets a parameter called `score` and the output `score` stand side by side, and says
    nothing (pytorch#158094, pytorch#168211); runtimes refuse such a file or compute nonsense.
    """
    edges = [*graph.inputs, *graph.outputs]
    taken = {value.name for value in edges}
    inner = [value for node in graph for value in node.outputs] + list(graph.initializers.values())
    for value in inner:
        if value.name in taken and not any(value is edge for edge in edges):
            value.name = f"{value.name}__inner"


def tidy(model: onnx.ModelProto) -> None:
    """Remove what does not belong in the file, and give the batch axis its name.

    Stack traces of the exporting machine would give each machine another digest. Shapes of inner
    values are derived again by every runtime, and the exporter's own trip quantisers.
    """
    graph = model.graph
    del graph.value_info[:]
    del model.metadata_props[:]
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]
    for value in (*graph.input, *graph.output):
        for axis in value.type.tensor_type.shape.dim[:1]:
            if axis.dim_param:
                axis.dim_param = BATCH_AXIS


def write_stamp(model: onnx.ModelProto, values: dict[str, str]) -> None:
    """Record where the model comes from; every ONNX runtime can read it back."""
    prefixed = {f"{STAMP_PREFIX}.{name}": value for name, value in sorted(values.items())}
    onnx.helper.set_model_props(model, prefixed)


def check_onnx(model: onnx.ModelProto, columns: DatasetSchema) -> None:
    """Prove that the model is valid and takes any number of raw rows.

    Raises:
        ConversionError: the ONNX checker refuses it, or names and axes are not the promised ones.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as exc:
        raise ConversionError(
            f"the exported ONNX model is not valid: {sentence_of(exc)}. Nothing was kept of it"
        ) from exc
    seen = [(v.name, _axes(v)) for v in (*model.graph.input, *model.graph.output)]
    expected: list[tuple[str, list[object]]] = [
        (INPUT_NAMES[0], [BATCH_AXIS, len(columns.categorical)]),
        (INPUT_NAMES[1], [BATCH_AXIS, len(columns.numeric)]),
        (OUTPUT_NAME, [BATCH_AXIS]),
    ]
    if seen != expected:
        raise ConversionError(
            f"the exported ONNX model has {seen}, expected {expected}; export the program with a "
            "dynamic first axis"
        )


def _axes(value: onnx.ValueInfoProto) -> list[object]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
