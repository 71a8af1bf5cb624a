"""PyTorch program to ONNX: one file, opset pinned, any number of rows, the same bytes each time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from google.protobuf.message import DecodeError

from tasks.contracts.conversion import Signature, TensorSpec
from tasks.conversion.provenance import STAMP_PREFIX
from tasks.conversion.targets.interface import BuildRequest
from tasks.conversion.variants import sentence_of
from tasks.kernel.errors import ArtifactError, ConversionError

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model.onnx"


def write_onnx(request: BuildRequest, folder: Path) -> dict[str, str]:
    """Convert the program to ONNX.

    Raises:
        ConversionError: the program has an operator that ONNX lacks, takes other inputs than its
            signature says, or the exported file does not pass the ONNX checker.
        ArtifactError: the program file is absent or damaged.
    """
    from tasks.conversion.targets.program import check_program, load_program

    signature, opset = request.program.signature, request.config.opset
    loaded = load_program(request.program_path)
    check_program(loaded, signature)
    model = export_onnx(loaded, opset, signature)
    check_opset(model, opset)
    tidy(model, signature)
    finish_onnx(model, request, folder)
    return {"opset": str(opset)}


def check_opset(model: onnx.ModelProto, opset: int) -> None:
    """Refuse a model of another operator set than was asked for; the exporter only notes that.

    Raises:
        ConversionError: it has another one, or operators of a library of its own.
    """
    seen = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    if seen != {"ai.onnx": opset}:
        told = ", ".join(f"{domain} {number}" for domain, number in sorted(seen.items()))
        raise ConversionError(
            f"the program was written with the ONNX operator sets {told}, asked for was ai.onnx "
            f"{opset} alone; an operator of the program has no form in it. Set conversion.opset to "
            "a version that has one, or replace the operator in the network"
        )


def finish_onnx(model: onnx.ModelProto, request: BuildRequest, folder: Path) -> None:
    """Stamp, check and write a model: the last steps of every ONNX form.

    Raises:
        ConversionError: the ONNX checker refuses it, or names and axes are not the promised ones.
    """
    write_stamp(model, request.stamp)
    check_onnx(model, request.program.signature)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString(deterministic=True))


def export_onnx(
    program: torch.export.ExportedProgram, opset: int, signature: Signature
) -> onnx.ModelProto:
    """The program as an ONNX model whose inputs and output are named as the signature says.

    Raises:
        ConversionError: ONNX has no form of an operator of the program.
    """
    import torch

    try:
        with _quiet_exporter():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[signature.output.name],
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


def tidy(model: onnx.ModelProto, signature: Signature) -> None:
    """Remove what does not belong in the file, and give the axes their names.

    Stack traces of the exporting machine would give each machine another digest. Shapes of inner
    values are derived again by every runtime, and the exporter's own trip quantisers.
    """
    graph = model.graph
    del graph.value_info[:]
    del model.metadata_props[:]
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]
    for value, spec in zip((*graph.input, *graph.output), _specs(signature), strict=False):
        for axis, name in zip(value.type.tensor_type.shape.dim, spec.shape, strict=False):
            if axis.dim_param and isinstance(name, str):
                axis.dim_param = name


def write_stamp(model: onnx.ModelProto, values: Mapping[str, str]) -> None:
    """Record where the model comes from; every ONNX runtime can read it back."""
    prefixed = {f"{STAMP_PREFIX}.{name}": value for name, value in sorted(values.items())}
    onnx.helper.set_model_props(model, prefixed)


def read_stamp(folder: Path) -> dict[str, str]:
    """The stamp of the model in a folder; empty where it has none.

    Raises:
        ArtifactError: there is no readable model.
    """
    try:
        model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    except (OSError, DecodeError) as exc:
        raise ArtifactError(
            f"{MODEL_FILE} cannot be read as an ONNX model ({sentence_of(exc)}); build the variant "
            "again"
        ) from exc
    prefix = f"{STAMP_PREFIX}."
    return {
        entry.key.removeprefix(prefix): entry.value
        for entry in model.metadata_props
        if entry.key.startswith(prefix)
    }


def check_onnx(model: onnx.ModelProto, signature: Signature) -> None:
    """Prove that the model is valid and takes any number of rows.

    Raises:
        ConversionError: the ONNX checker refuses it, or names and axes are not the promised ones.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as exc:
        raise ConversionError(
            f"the exported ONNX model is not valid: {sentence_of(exc)}. Nothing was kept of it"
        ) from exc
    seen = [_told(value) for value in (*model.graph.input, *model.graph.output)]
    expected = [(spec.name, spec.dtype, list(spec.shape)) for spec in _specs(signature)]
    if seen != expected:
        raise ConversionError(
            f"the exported ONNX model has {seen}, expected {expected}; export the program with a "
            "dynamic first axis"
        )


def _specs(signature: Signature) -> tuple[TensorSpec, ...]:
    return (*signature.inputs, signature.output)


def _told(value: onnx.ValueInfoProto) -> tuple[str, str, list[object]]:
    tensor = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return value.name, dtype, [d.dim_param or d.dim_value for d in tensor.shape.dim]
