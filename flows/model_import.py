"""Import: a model that was trained elsewhere, registered and converted like our own."""

from __future__ import annotations

from prefect import flow

from flows.config import ImportConfig
from flows.conversion import convert_version
from flows.stages import RECORDED
from tasks.contracts.conversion import ImportedProgram, PreparedRows
from tasks.contracts.release import ImportedModel
from tasks.imports.task import export_encoder, prepare_corpus, take_program, take_rows
from tasks.kernel.provenance import code_commit
from tasks.lineage.task import record_conversion, record_import
from tasks.registry.task import claim_model_name, register_import


@flow(
    name="model-import",
    flow_run_name="import-{config.registry.model_name}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def model_import_flow(config: ImportConfig) -> ImportedModel:
    """Register a model that was trained elsewhere, and build, judge and file its variants.

    Args:
        config: the import.
    """
    claim_model_name(None, None, config.registry)
    imported, rows = _taken(config)
    version = register_import(imported, config.registry, code_commit())
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
