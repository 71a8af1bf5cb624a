"""OpenVINO IR to INT8: matrix products in 8-bit integers, calibrated on validated rows."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.openvino_export import read_ir, save_ir, without_reporting
from tasks.conversion.program import INPUT_NAMES
from tasks.conversion.rows import ModelInputs, read_rows
from tasks.conversion.variants import (
    build_variant,
    library_versions,
    sentence_of,
    source_folder,
    stamp,
)
from tasks.errors import ConversionError, DataContractError
from tasks.settings import ArtifactStore

# NNCF averages the ranges of batches. Ranges of single rows are too narrow: on real flights the
# largest gap was 0.16 with batches of 1, 0.03 of 64, 0.01 of 512 and of all 2000 rows at once.
CALIBRATION_BATCH_ROWS = 512


def build_int8(
    program: RegisteredProgram,
    source: BuiltVariant,
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: ConversionConfig,
    store: ArtifactStore,
) -> BuiltVariant:
    """Quantise the OpenVINO form, its value ranges taken from a sample of the training window.

    Args:
        program: what the OpenVINO form was made from.
        source: the OpenVINO form, as `build_openvino` returned it.
        dataset: validated rows; without a validation result nothing calibrates.
        splits: `train` is the window of the calibration rows.
        config: sample size, seed and the layers to quantise.
        store: holds rows and source, receives the IR.

    Returns:
        The variant; without files and with `failure` where there are no rows to calibrate on or
        NNCF cannot quantise the model.

    Raises:
        ArtifactError: rows or source are absent or damaged.
        StorageError: the disk refused a write.
    """
    versions = library_versions("openvino", "nncf")

    def convert(folder: Path) -> dict[str, str]:
        model = read_ir(source_folder(source, store))
        sample = _calibration_rows(program, dataset, splits, config, store)
        quantized = quantize(model, sample, config.quantized_layers)
        save_ir(quantized, folder, stamp("openvino-int8", program))
        return {
            "made_from": source.name,
            "calibration_rows": str(sample.num_rows),
            "calibration_snapshot_sha256": dataset.snapshot.data.sha256,
            "calibration_window": str(splits.train),
            "quantized_layers": ", ".join(config.quantized_layers),
            **versions,
        }

    rows = (dataset.snapshot.data, splits.train, config.calibration_rows, config.seed)
    decisive = (source, *rows, config.quantized_layers, versions)
    return build_variant("openvino-int8", program, config, store, decisive, convert)


def _calibration_rows(
    program: RegisteredProgram,
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: ConversionConfig,
    store: ArtifactStore,
) -> ModelInputs:
    try:
        rows = read_rows(
            dataset,
            program.columns,
            splits.train,
            store,
            limit=config.calibration_rows,
            seed=config.seed,
        )
    except DataContractError as exc:
        raise ConversionError(f"there is nothing to calibrate INT8 on: {exc}") from exc
    return rows.inputs


def quantize(model: Any, sample: ModelInputs, layers: tuple[str, ...]) -> Any:
    """A copy of an `openvino.Model` whose `layers` take and hold 8-bit integers.

    Everything else is left in floats on purpose. Raw numbers have heavy tails, and one scale for
    all columns crushes most of them; what enters the first matrix product is encoded, in 0 to 1.

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
    batches = list(_batches(sample))
    if not batches:
        raise ConversionError("the calibration sample is empty; give INT8 at least one row")
    try:
        with _quiet_nncf():
            return nncf.quantize(
                model,
                nncf.Dataset(batches),
                preset=nncf.QuantizationPreset.MIXED,
                subset_size=len(batches),
                ignored_scope=others,
            )
    except (RuntimeError, nncf.ValidationError, nncf.InternalError) as exc:
        raise ConversionError(
            f"NNCF cannot quantise the model: {sentence_of(exc)}. The 32-bit forms serve meanwhile"
        ) from exc


def _batches(sample: ModelInputs) -> Iterator[dict[str, Any]]:
    for start in range(0, sample.num_rows, CALIBRATION_BATCH_ROWS):
        part = sample.block(start, start + CALIBRATION_BATCH_ROWS)
        yield dict(zip(INPUT_NAMES, (part.categorical, part.numeric), strict=True))


@contextlib.contextmanager
def _quiet_nncf() -> Iterator[None]:
    """Without the progress bars that NNCF draws on standard output."""
    without_reporting("nncf").set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
