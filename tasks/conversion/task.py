"""Prefect tasks of the conversion room."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_table_artifact

from tasks.contracts.calibration import FitOutcome
from tasks.contracts.data import AUC_NAME, R2_NAME, DataSplits, ValidatedDataset
from tasks.contracts.release import BuiltVariant, CalibrationSource, ModelVariant, RegisteredProgram
from tasks.contracts.training import RecalibratedModel
from tasks.conversion.config import ConversionConfig
from tasks.retry_policy import NUM_RETRIES, RETRY_DELAYS_S, RETRY_JITTER, ByContent, only_transient
from tasks.settings import Settings

TIMEOUT_S = 900


@task(
    name="convert-to-onnx",
    task_run_name="convert-v{program.version.version}-to-onnx",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def convert_to_onnx(program: RegisteredProgram, config: ConversionConfig) -> BuiltVariant:
    """Convert a registered program to ONNX.

    Safe to retry: the file appears whole, under a key of its content, or not at all.

    Raises:
        ArtifactError: the program file is absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.conversion.onnx_export import build_onnx

    return build_onnx(program, config, Settings.from_environment().store)


@task(
    name="convert-to-openvino",
    task_run_name="convert-v{program.version.version}-to-openvino",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def convert_to_openvino(
    program: RegisteredProgram, onnx: BuiltVariant, config: ConversionConfig
) -> BuiltVariant:
    """Convert the ONNX form to OpenVINO IR in 32-bit floats.

    Safe to retry: the files appear whole, under a key of their content, or not at all.

    Raises:
        ArtifactError: the ONNX form is absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.conversion.openvino_export import build_openvino

    return build_openvino(program, onnx, config, Settings.from_environment().store)


@task(
    name="quantize-to-int8",
    task_run_name="quantize-v{program.version.version}-to-int8",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def quantize_to_int8(
    program: RegisteredProgram,
    openvino: BuiltVariant,
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: ConversionConfig,
) -> BuiltVariant:
    """Quantise the OpenVINO form, calibrated on validated rows of the training window.

    Safe to retry: the sample is seeded, and the files appear whole or not at all.

    Raises:
        ArtifactError: the rows or the OpenVINO form are absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.conversion.quantization import build_int8

    store = Settings.from_environment().store
    return build_int8(program, openvino, dataset, splits, config, store)


@task(
    name="map-program",
    task_run_name="map-v{source.program.version.version}",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def map_program(
    source: CalibrationSource, outcome: FitOutcome, dataset: ValidatedDataset, splits: DataSplits
) -> RecalibratedModel:
    """Put a fitted map of the scores into the program of a registered version.

    Safe to retry: the program appears whole, under a key of its content, or not at all.

    Raises:
        ConversionError: the program has no place for a map. Not retried.
        ConversionParityError: the new program does not give the mapped scores. Not retried.
        ArtifactError: a file is absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.conversion import score_map

    assert outcome.fit is not None
    store = Settings.from_environment().store
    return score_map.map_program(source, outcome.fit, dataset, splits, store)


@task(
    name="judge-variants",
    task_run_name="judge-v{program.version.version}-on-{config.hardware_class}",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def judge_variants(
    program: RegisteredProgram,
    built: tuple[BuiltVariant, ...],
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: ConversionConfig,
) -> tuple[ModelVariant, ...]:
    """Keep or drop every target, by parity, task metric and measured speed.

    Safe to retry: it only reads and measures. Latency is a measurement of one moment on one
    machine. Reusing it is right while model, forms, rows and code are the same: nothing changed,
    so nothing is to be decided anew. Parity and AUC do not depend on the moment.

    Raises:
        ArtifactError: a file is absent or damaged. Not retried.
        DataContractError: the test window cannot judge: no rows, or labels that are all equal. Not
            retried.
    """
    from tasks.conversion.judge import judge_variants as judge

    variants = judge(program, built, dataset, splits, config, Settings.from_environment().store)
    create_table_artifact(
        table=latency_table(variants),
        key="model-variants",
        description=f"Converted forms of `{program.version.name}` version "
        f"{program.version.version} on {config.hardware_class}, {config.threads} thread(s): what "
        "was kept, and why.",
    )
    return variants


def latency_table(variants: tuple[ModelVariant, ...]) -> list[dict[str, str]]:
    """One row a variant: verdict, agreement, latency and ratio to PyTorch eager by batch size."""
    return [
        {
            "variant": variant.name,
            "verdict": "kept" if variant.kept else "dropped",
            "largest gap": _figure(variant.parity_max),
            f"{R2_NAME if variant.r2_change else AUC_NAME} change": _figure(
                variant.quality_change.value if variant.quality_change else None
            ),
            "size, kB": f"{variant.num_bytes / 1e3:.0f}",
            **{
                f"ms at batch {at.batch_rows} (of PyTorch's)": (
                    f"{at.p50_ms:.3f} ({at.ratio_to_eager:.2f})"
                )
                for at in variant.latencies
            },
            "reason": variant.reason,
        }
        for variant in variants
    ]


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2g}"
