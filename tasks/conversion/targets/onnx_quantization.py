"""ONNX to INT8: matrix products between pairs of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from tasks.conversion.kinds.interface import Batches
from tasks.conversion.processor import this_processor
from tasks.conversion.targets.interface import BuildRequest
from tasks.conversion.targets.onnx import MODEL_FILE, finish_onnx
from tasks.conversion.targets.onnx_graphs import MATRIX_PRODUCTS
from tasks.conversion.variants import sentence_of
from tasks.kernel.errors import ConversionError
from tasks.kernel.scratch import scratch_folder

# With these TensorRT takes the file too: it knows no quantised bias, and no zero point but 0. The
# outputs of products are quantised as well: else ONNX Runtime multiplies in floats on processors.
_OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "QuantizeBias": False,
}


def write_int8(request: BuildRequest, folder: Path, source: str) -> dict[str, str]:
    """Quantise the matrix products of the ONNX form `source`, ranges from calibrating rows.

    Raises:
        ConversionError: the source was not built, there are no rows to calibrate on, or ONNX
            Runtime cannot quantise the model.
        ArtifactError: rows or source are absent or damaged.
    """
    path = request.source_folder(source) / MODEL_FILE
    sample = request.calibration()
    model = quantize_onnx(path, sample, this_processor().weight_bits)
    finish_onnx(model, request, folder)
    return {
        "made_from": source,
        "calibration_rows": str(sum(batch.num_rows for batch in sample)),
        "quantized_layers": ", ".join(MATRIX_PRODUCTS),
    }


def quantize_onnx(path: Path, sample: Batches, weight_bits: int = 8) -> onnx.ModelProto:
    """The model of a file with its matrix products in 8 bits, a scale for each column of weights.

    With `weight_bits` 7 the weights take half of their range, so that no sum of products saturates.

    Raises:
        ConversionError: the sample is empty, the model has no matrix product, or ONNX Runtime
            refuses it.
    """
    model = onnx.load(path)
    present = {node.op_type for node in model.graph.node}
    if not present.intersection(MATRIX_PRODUCTS):
        raise ConversionError(
            f"the model has no {' or '.join(MATRIX_PRODUCTS)} to quantise, only "
            f"{', '.join(sorted(present))}"
        )
    if not sample:
        raise ConversionError("the calibration sample is empty; give INT8 at least one row")
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
                reduce_range=weight_bits == 7,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
                extra_options=dict(_OPTIONS),
            )
        except (RuntimeError, ValueError) as exc:
            raise ConversionError(
                f"ONNX Runtime cannot quantise the model: {sentence_of(exc)}. The 32-bit forms "
                "serve meanwhile"
            ) from exc
        quantized = onnx.load(written)
    del quantized.graph.value_info[:]
    return quantized


class _Reader(CalibrationDataReader):
    def __init__(self, sample: Batches) -> None:
        self._batches = iter(sample)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else dict(batch)
