"""Convert: one registered version into a form for each target, each kept only if it earns it."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.provenance import code_commit
from flows.whereabouts import RECORDED
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import ModelVariant
from tasks.conversion.task import (
    convert_to_onnx,
    convert_to_openvino,
    judge_variants,
    quantize_to_int8,
)
from tasks.lineage.task import record_conversion
from tasks.registry.task import attach_variants, fetch_version


@flow(
    name="conversion",
    flow_run_name="convert-{version.name}-v{version.version}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def conversion_flow(
    version: ModelVersionRef, dataset: ValidatedDataset, config: PipelineConfig
) -> tuple[ModelVariant, ...]:
    """Build, judge and file the variants of a model version.

    Args:
        version: The registered version.
        dataset: Validated rows: the training window calibrates, the test window judges.
        config: The use case.
    """
    program = fetch_version(version)
    onnx = convert_to_onnx(program, config.conversion)
    openvino = convert_to_openvino(program, onnx, config.conversion)
    int8 = quantize_to_int8(program, openvino, dataset, config.splits, config.conversion)
    variants = judge_variants(
        program, (onnx, openvino, int8), dataset, config.splits, config.conversion
    )
    attach_variants(version, variants)
    record_conversion(version, dataset, variants, code_commit(), return_state=True)
    return variants
