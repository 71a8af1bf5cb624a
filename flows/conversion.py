"""Convert: one version into a variant for each target, accepted only if it is worth it.

Import: a model that was trained elsewhere, registered and converted like our own.
"""

from prefect import flow
from pydantic import PositiveInt

from flows.candidate import validated_rows
from flows.config import ImportConfig, PipelineConfig
from flows.stages import RECORDED, called, check_places
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ConversionRows, ImportedProgram, PreparedRows, SnapshotRows
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import ImportedModel, ModelVariant
from tasks.conversion.config import ConversionConfig, HardwareConversion
from tasks.conversion.task import add_triton_repositories, build_variants, judge_variants
from tasks.imports.task import export_encoder, prepare_corpus, take_program, take_rows
from tasks.kernel.provenance import code_commit
from tasks.lineage.task import find_raw_files, record_conversion, record_import
from tasks.registry import task as registry


@flow(name="conversion", flow_run_name="convert-{version.name}-v{version.version}", **RECORDED)
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
    check_places(config)
    rows = SnapshotRows(dataset=dataset, splits=config.splits)
    variants = convert_version(version, rows, config.conversion.on(hardware))
    record_conversion(version, dataset, variants, code_commit(), return_state=True)
    return variants


def convert_version(
    version: ModelVersionRef, rows: ConversionRows, config: ConversionConfig
) -> tuple[ModelVariant, ...]:
    """The same for a model of any family, whatever its rows are made of."""
    program = registry.fetch_version(version)
    built = build_variants(program, rows, config)
    judged = judge_variants(program, built, rows, config)
    variants = add_triton_repositories(program, judged, rows, config)
    registry.attach_variants(version, variants, find_raw_files(version))
    return variants


@flow(name="reconversion", flow_run_name="reconvert-{config.registry.model_name}", **RECORDED)
def reconversion_flow(
    version: PositiveInt | None, config: PipelineConfig
) -> tuple[ModelVariant, ...]:
    """Build, judge and file variants of a registered version anew, for one class of hardware.

    They take the place of those that it has for that class.

    Its rows are those of its own training: the snapshot is taken from the store, or built again
    where it is gone. A model that was trained elsewhere is imported again instead.

    Args:
        version: number of the registered version; None for the champion, and before there is one
            for the candidate.
        config: the use case; its section `conversion` says what to make, and on what hardware.

    Raises:
        RegistryError: there is no such version, it is damaged, or was trained elsewhere.
    """
    check_places(config)
    trained = registry.find_trained(config.registry, version)
    if trained.splits != config.splits:
        config = config.with_splits(trained.splits)
    return called(conversion_flow, trained.version, validated_rows(config), config)


@flow(name="model-import", flow_run_name="import-{config.registry.model_name}", **RECORDED)
def model_import_flow(config: ImportConfig) -> ImportedModel:
    """Register a model that was trained elsewhere, and build, judge and file its variants.

    Args:
        config: the import.
    """
    registry.claim_model_name(None, None, config.registry)
    imported, rows = _taken(config)
    version = registry.register_import(imported, config.registry, code_commit())
    record_import(version, imported, code_commit(), return_state=True)
    variants = convert_version(version, rows, config.conversion)
    record_conversion(version, rows, variants, code_commit(), return_state=True)
    return ImportedModel(version=version, variants=variants)


def _taken(config: ImportConfig) -> tuple[ImportedProgram, PreparedRows]:
    if config.encoder is not None:
        imported = export_encoder(config.encoder)
    else:
        assert config.program is not None
        imported = take_program(config.program)
    if config.rows is not None:
        return imported, take_rows(config.rows)
    assert config.corpus is not None
    assert config.encoder is not None
    return imported, prepare_corpus(config.corpus, config.encoder)
