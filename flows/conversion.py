"""Convert: one registered version into a form for each target, each kept only if it earns it."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.provenance import code_commit
from flows.whereabouts import RECORDED
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ConversionRows, SnapshotRows
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import ModelVariant
from tasks.conversion.config import ConversionConfig, HardwareConversion
from tasks.conversion.task import add_triton_repositories, build_variants, judge_variants
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
    version: ModelVersionRef,
    dataset: ValidatedDataset,
    config: PipelineConfig,
    hardware: HardwareConversion | None = None,
) -> tuple[ModelVariant, ...]:
    """Build, judge and file the variants of a model version.

    Args:
        version: The registered version.
        dataset: Validated rows: the training window calibrates, the test window judges.
        config: The use case.
        hardware: Kind of machine and its targets, where they are not those of the use case.
    """
    rows = SnapshotRows(dataset=dataset, splits=config.splits)
    variants = convert_version(version, rows, config.conversion.on(hardware))
    record_conversion(version, dataset, variants, code_commit(), return_state=True)
    return variants


def convert_version(
    version: ModelVersionRef, rows: ConversionRows, config: ConversionConfig
) -> tuple[ModelVariant, ...]:
    """The same for a model of any family, whatever its rows are made of."""
    program = fetch_version(version)
    built = build_variants(program, rows, config)
    judged = judge_variants(program, built, rows, config)
    variants = add_triton_repositories(program, judged, rows, config)
    attach_variants(version, variants)
    return variants
