"""ONNX: one file, any number of rows, the same bytes each time; run by ONNX Runtime.

ONNX in 16-bit floats, for graphics processors; raw values are still encoded in 32 bits.

ONNX Runtime has a converter too. It halves every input before anything reads it, also what is kept
in 32 bits, and leaves nodes out of order, so that the checker refuses the file.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from tasks.contracts.conversion import Signature, TensorSpec
from tasks.conversion.provenance import processor_equipment, weight_bits
from tasks.conversion.targets.catalog import Format
from tasks.conversion.targets.interface import (
    PROVENANCE_PREFIX,
    Array,
    Batches,
    BuildRequest,
    Float32Array,
    LoadedModel,
    Runtime,
    check_quantisable,
    first_line_of,
    loaded,
)
from tasks.conversion.targets.trees import has_tree_operator, put_operator, replace_all, trees_of
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.files import scratch_folder

if TYPE_CHECKING:
    import torch


MATRIX_PRODUCTS = ("MatMul", "Gemm")
LARGEST = 65504.0  # that 16 bits hold
# Operators that ONNX or its runtimes do not have for 16-bit floats.
IN_32_BITS = ("CumSum", "NonMaxSuppression", "Range", "Resize", "TopK", "Upsample")
_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def halve(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in 16-bit floats behind the encoding of its inputs.

    Raises:
        ConversionError: it has branches or loops, whose inner graphs are not looked into.
    """
    if any(a.type == onnx.AttributeProto.GRAPH for n in model.graph.node for a in n.attribute):
        raise ConversionError(
            "the model has a branch or a loop, and 16-bit floats are set up for plain graphs only"
        )
    halved = onnx.ModelProto()
    halved.CopyFrom(model)
    _Halving(halved).run()
    return halved


class _Halving:
    """One pass over the nodes in their order; casts are put in where the width changes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._kept = set(encoding_nodes(model))
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self._floats = {v.name for v in values if v.type.tensor_type.elem_type == _FLOAT}
        self._weights = {t.name: t for t in self._graph.initializer if t.data_type == _FLOAT}
        self._halved: set[str] = set()
        self._made: set[str] = set()
        self._nodes: list[onnx.NodeProto] = []

    def run(self) -> None:
        outputs = {value.name for value in self._graph.output} & self._floats
        for node in list(self._graph.node):
            is_halved = node.name not in self._kept and node.op_type not in IN_32_BITS
            for position, name in enumerate(node.input):
                node.input[position] = self._read(name, half=is_halved)
            self._nodes.append(node)
            if is_halved:
                self._halve_outputs(node, outputs)
        replace_all(self._graph.node, self._nodes)
        read = {name for node in self._nodes for name in node.input}
        replace_all(self._graph.initializer, [t for t in self._graph.initializer if t.name in read])

    def _halve_outputs(self, node: onnx.NodeProto, outputs: set[str]) -> None:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _FLOAT:
                attribute.i = _HALF
        for position, name in enumerate(node.output):
            if name in outputs:
                node.output[position] = f"{name}__half"
                self._cast(f"{name}__half", name, _FLOAT)
            elif name in self._floats:
                self._halved.add(name)

    def _read(self, name: str, *, half: bool) -> str:
        """What a node reads instead of a value, in the width that it works in."""
        is_float = name in self._floats or name in self._weights
        if (name in self._halved) == half or not (is_float or name in self._halved):
            return name
        other = f"{name}__{'half' if half else 'float'}"
        if other not in self._made:
            self._made.add(other)
            if half and name in self._weights:
                values = numpy_helper.to_array(self._weights[name])
                clipped = np.clip(values, -LARGEST, LARGEST).astype(np.float16)
                self._graph.initializer.append(numpy_helper.from_array(clipped, other))
            else:
                self._cast(name, other, _HALF if half else _FLOAT)
        return other

    def _cast(self, source: str, target: str, width: int) -> None:
        self._nodes.append(
            helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=width)
        )


def encoding_nodes(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes that no matrix product comes before: the encoding of raw values.

    Raw numbers have heavy tails and large ranges, and lose too much in few bits. What leaves the
    first matrix product is the network's own. Tables that integers look up are no encoding.
    """
    tables = {tensor.name for tensor in model.graph.initializer}
    reached: set[str] = set()
    encoding = []
    for node in model.graph.node:  # an ONNX graph lists its nodes in an order of computation
        if node.op_type in MATRIX_PRODUCTS or reached.intersection(node.input):
            reached.update(node.output)
        elif not (node.op_type == "Gather" and node.input[0] in tables):
            encoding.append(node.name)
    return encoding


MODEL_FILE = "model.onnx"
OPSET = 20
"""ONNX operator set that all runtimes here, and Triton's, know."""
GPU_PROVIDER = "CUDAExecutionProvider"
# With these TensorRT takes the file too: it knows no quantised bias, and no zero point but 0. The
# outputs of products are quantised as well: else ONNX Runtime multiplies in floats on processors.
_QUANTIZED = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "QuantizeBias": False,
}
_REFUSALS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


equipment = processor_equipment


def build(made: Format, request: BuildRequest, folder: Path) -> dict[str, str]:
    """Export the program, or make the 32-bit file narrower.

    Raises:
        ConversionError: ONNX lacks an operator, the source was not built, it has branches, the
            quantiser refuses it, or the file is not a valid one with the promised inputs.
        ArtifactError: the program or the source is absent or damaged.
    """
    if made.precision == "fp32":
        model, how = _exported(request), {"opset": str(OPSET)}
    else:
        (source,) = made.made_from
        wide = in_products(request, source)
        if made.precision == "fp16":
            model, how = halve(wide), {"kept_in_fp32": "encoding of raw values"}
        else:
            model = quantize_onnx(wide, request.sample, weight_bits())
            rows = sum(batch.num_rows for batch in request.sample)
            how = {"calibration_rows": str(rows), "quantized_layers": ", ".join(MATRIX_PRODUCTS)}
        how = {"made_from": source, **how}
    write_provenance(model, request.provenance)
    check_onnx(model, request.program.signature)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString(deterministic=True))
    return how


def _exported(request: BuildRequest, *, as_trees: bool = True) -> onnx.ModelProto:
    """The program in ONNX; its boosted trees, where it has any, as ONNX's operator for them."""
    from tasks.conversion.targets.pytorch import check_program, load_program

    signature = request.program.signature
    program = load_program(request.store.path(request.program.program))
    check_program(program, signature)
    model = export_onnx(program, signature)
    check_opset(model)
    if as_trees and (trees := trees_of(program)) is not None:
        put_operator(model, *trees)
    tidy(model, signature)
    return model


def in_products(request: BuildRequest, source: str) -> onnx.ModelProto:
    """The 32-bit variant as a file that every runtime knows: boosted trees as matrix products.

    Raises:
        ConversionError: that variant could not be built.
        ArtifactError: it or the program is absent or damaged.
    """
    model = onnx.load(request.source_folder(source) / MODEL_FILE)
    return _exported(request, as_trees=False) if has_tree_operator(model) else model


def check_opset(model: onnx.ModelProto) -> None:
    """Refuse a model of another operator set than `OPSET`; the exporter only notes that.

    Raises:
        ConversionError: it has another one, or operators of a library of its own.
    """
    seen = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    if seen != {"ai.onnx": OPSET}:
        sets = ", ".join(f"{domain} {number}" for domain, number in sorted(seen.items()))
        raise ConversionError(
            f"the program was written with the ONNX operator sets {sets}, expected ai.onnx {OPSET} "
            "alone: it lacks an operator of the program. Replace that operator in the network"
        )


def export_onnx(program: torch.export.ExportedProgram, signature: Signature) -> onnx.ModelProto:
    """The program as an ONNX model whose inputs and output are named as the signature says.

    Raises:
        ConversionError: ONNX lacks an operator of the program.
    """
    import torch

    try:
        with _quiet_exporter():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[signature.output.name],
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as exc:
        raise ConversionError(
            f"the program cannot be written as ONNX opset {OPSET}: {first_line_of(exc)}. Replace "
            "that operator in the network"
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

    The exporter lets a parameter and the output share the name `score` (pytorch#158094,
    pytorch#168211); runtimes refuse such a file or compute nonsense.
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


def write_provenance(model: onnx.ModelProto, values: Mapping[str, str]) -> None:
    """Record where the model comes from; every ONNX runtime can read it back."""
    prefixed = {f"{PROVENANCE_PREFIX}.{name}": value for name, value in sorted(values.items())}
    onnx.helper.set_model_props(model, prefixed)


def read_provenance(folder: Path) -> dict[str, str]:
    """The provenance of the model in a folder; empty where it has none.

    Raises:
        ArtifactError: there is no readable model.
    """
    try:
        model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    except (OSError, DecodeError) as exc:
        raise ArtifactError(
            f"{MODEL_FILE} cannot be read as an ONNX model ({first_line_of(exc)}); build the "
            "variant again"
        ) from exc
    prefix = f"{PROVENANCE_PREFIX}."
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
            f"the exported ONNX model is not valid: {first_line_of(exc)}. Nothing was kept of it"
        ) from exc
    seen = [_tensor(value) for value in (*model.graph.input, *model.graph.output)]
    expected = [(spec.name, spec.dtype, list(spec.shape)) for spec in _specs(signature)]
    if seen != expected:
        raise ConversionError(
            f"the exported ONNX model has {seen}, expected {expected}; export the program with a "
            "dynamic first axis"
        )


def _specs(signature: Signature) -> tuple[TensorSpec, ...]:
    return (*signature.inputs, signature.output)


def _tensor(value: onnx.ValueInfoProto) -> tuple[str, str, list[object]]:
    tensor = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return value.name, dtype, [d.dim_param or d.dim_value for d in tensor.shape.dim]


def quantize_onnx(model: onnx.ModelProto, sample: Batches, bits: int = 8) -> onnx.ModelProto:
    """A model with its matrix products in 8 bits, a scale for each column of weights.

    With `bits` 7 the weights take half of their range, so that no sum of products saturates.

    Raises:
        ConversionError: the sample is empty, the model has no matrix product, or ONNX Runtime
            refuses it.
    """
    from onnxruntime.quantization import QuantType, quantize_static

    check_quantisable({node.op_type for node in model.graph.node}, MATRIX_PRODUCTS)
    # The exporter has folded constants already. Without this mark the quantiser would advise it,
    # on the root logger, and give that a handler.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with scratch_folder("falaj-quantization") as scratch:
        written = scratch / MODEL_FILE
        try:
            quantize_static(
                model,
                written,
                _Reader(sample),
                op_types_to_quantize=list(MATRIX_PRODUCTS),
                per_channel=True,
                reduce_range=bits == 7,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
                extra_options=dict(_QUANTIZED),
            )
        except (RuntimeError, ValueError) as exc:
            raise ConversionError(
                f"ONNX Runtime cannot quantise the model: {first_line_of(exc)}"
            ) from exc
        quantized = onnx.load(written)
    del quantized.graph.value_info[:]
    return quantized


class _Reader:
    """Calibrating calls as ONNX Runtime asks for them."""

    def __init__(self, sample: Batches) -> None:
        self._batches = iter(sample)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)


def load(made: Format, folder: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    """Load a file into ONNX Runtime, on the hardware it is asked for and no other.

    Raises:
        ConversionError: ONNX Runtime refuses the file, or runs with other settings.
    """
    start = time.perf_counter()
    provider = GPU_PROVIDER if runtime.hardware_class.startswith("gpu") else "CPUExecutionProvider"
    options = ort.SessionOptions()
    options.intra_op_num_threads = runtime.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(folder / MODEL_FILE, options, providers=[provider])
    except _REFUSALS as exc:
        raise ConversionError(f"ONNX Runtime cannot load the model: {first_line_of(exc)}") from exc
    outputs = [signature.output.name]

    def score(arrays: dict[str, Array]) -> Float32Array:
        scores: Float32Array = session.run(outputs, arrays)[0]
        return scores

    used = session.get_session_options()
    settings = {
        "runtime": f"onnxruntime {ort.__version__}",
        "threads": str(used.intra_op_num_threads),
        "spinning": used.get_session_config_entry("session.intra_op.allow_spinning"),
        "provider": session.get_providers()[0],  # without a GPU it silently falls back
    }
    wanted = {"threads": str(runtime.threads), "spinning": "0", "provider": provider}
    return loaded(start, score, signature, settings, wanted, _REFUSALS)
