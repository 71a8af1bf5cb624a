"""OpenVINO IR to INT8: matrix products in 8-bit integers, or the weights alone."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.conversion.kinds.interface import Batches
from tasks.conversion.kinds.registry import family_of
from tasks.conversion.processor import this_processor
from tasks.conversion.targets.interface import BuildRequest
from tasks.conversion.targets.openvino import read_ir, save_ir, without_reporting
from tasks.conversion.variants import sentence_of
from tasks.kernel.errors import ConversionError


def write_int8(request: BuildRequest, folder: Path, source: str) -> dict[str, str]:
    """Quantise the OpenVINO form `source`, its value ranges taken from calibrating rows.

    Raises:
        ConversionError: the source was not built, there are no rows to calibrate on, or NNCF
            cannot quantise the model.
        ArtifactError: rows or source are absent or damaged.
        StorageError: the disk refused a write.
    """
    model = read_ir(request.source_folder(source))
    sample, layers = request.calibration(), request.config.quantized_layers
    is_transformer = family_of(request.program).is_transformer
    bits = this_processor().weight_bits
    save_ir(quantize(model, sample, layers, is_transformer, bits), folder, request.stamp)
    return {
        "made_from": source,
        "calibration_rows": str(sum(batch.num_rows for batch in sample)),
        "quantized_layers": ", ".join(layers),
    }


def write_weights_int8(request: BuildRequest, folder: Path, source: str) -> dict[str, str]:
    """Keep the weights of the OpenVINO form `source` in 8 bits; it computes in floats.

    Raises:
        ConversionError: the source was not built, or NNCF cannot compress the model.
        ArtifactError: the source is absent or damaged.
        StorageError: the disk refused a write.
    """
    model = compress(read_ir(request.source_folder(source)))
    save_ir(model, folder, request.stamp)
    return {"made_from": source}


def compress(model: Any) -> Any:
    """An `openvino.Model` whose weights are 8-bit integers, with a scale for each channel.

    Raises:
        ConversionError: NNCF refuses it.
    """
    nncf = without_reporting("nncf")
    try:
        with _quiet_nncf():
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    except (RuntimeError, nncf.ValidationError, nncf.InternalError) as exc:
        raise ConversionError(
            f"NNCF cannot compress the weights: {sentence_of(exc)}. The 32-bit forms serve "
            "meanwhile"
        ) from exc


def quantize(
    model: Any,
    sample: Batches,
    layers: tuple[str, ...],
    is_transformer: bool = False,
    weight_bits: int = 8,
) -> Any:
    """A copy of an `openvino.Model` whose `layers` take and hold 8-bit integers.

    Everything else is left in floats on purpose. Raw numbers have heavy tails, and one scale for
    all columns crushes most of them; what enters the first matrix product is encoded, in 0 to 1.
    With `weight_bits` 7 the weights take half of their range, so that no sum of products saturates.

    Raises:
        ConversionError: the sample is empty, the model has none of the layers, or NNCF refuses it.
    """
    nncf = without_reporting("nncf")
    present = {operation.get_type_name() for operation in model.get_ops()}
    if not present & set(layers):
        raise ConversionError(
            f"the model has no {' or '.join(layers)} to quantise, only {', '.join(sorted(present))}"
        )
    others = nncf.IgnoredScope(types=sorted(present - set(layers)), validate=False)
    if not sample:
        raise ConversionError("the calibration sample is empty; give INT8 at least one row")
    fix = nncf.OverflowFix.ENABLE if weight_bits == 7 else nncf.OverflowFix.DISABLE
    try:
        with _quiet_nncf():
            return nncf.quantize(
                model,
                nncf.Dataset([dict(batch) for batch in sample]),
                preset=nncf.QuantizationPreset.MIXED,
                subset_size=len(sample),
                ignored_scope=others,
                model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
                advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
            )
    except (RuntimeError, nncf.ValidationError, nncf.InternalError) as exc:
        raise ConversionError(
            f"NNCF cannot quantise the model: {sentence_of(exc)}. The 32-bit forms serve meanwhile"
        ) from exc


@contextlib.contextmanager
def _quiet_nncf() -> Iterator[None]:
    """Without the progress bars that NNCF draws on standard output."""
    without_reporting("nncf").set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
