"""Prefect tasks of the imports room: models that were trained elsewhere, and their rows."""

from prefect import task

from tasks.contracts.conversion import ImportedProgram, PreparedRows
from tasks.contracts.data import EncodedColumn, FeatureSnapshot
from tasks.imports.config import CorpusConfig, EncoderConfig, ProgramConfig, RowsConfig
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import Settings

# What an import names is digested at each call, so nothing is cached by the names. Every task is
# safe to retry: what it builds appears whole, under a key of its content, or not at all.
_POLICY = uncached(900, kept=True)


@task(name="export-encoder", **_POLICY)
def export_encoder(config: EncoderConfig) -> ImportedProgram:
    """Build the program of a text encoder that was trained elsewhere.

    Safe to retry: the program appears whole, under a key of its content, or not at all.

    Raises:
        ConfigurationError: the files are not there, or are of another kind. Not retried.
        ArtifactError: the weights are damaged. Not retried.
    """
    from tasks.imports.program import export_encoder as export

    return export(config, Settings.from_environment().store)


@task(name="prepare-corpus", **_POLICY)
def prepare_corpus(config: CorpusConfig, encoder: EncoderConfig) -> PreparedRows:
    """Choose the texts that calibrate and judge, as token ids.

    Safe to retry: the choice is seeded, and the file appears whole or not at all.

    Raises:
        ConfigurationError: a source is not there. Not retried.
        DataContractError: there are too few texts. Not retried.
    """
    from tasks.imports.rows import prepare_corpus as prepare

    return prepare(config, encoder, Settings.from_environment().store)


@task(name="take-program", **_POLICY)
def take_program(config: ProgramConfig) -> ImportedProgram:
    """Take a program that was exported elsewhere.

    Safe to retry: the program appears whole, under a key of its content, or not at all.

    Raises:
        ConfigurationError: the file is not there. Not retried.
    """
    from tasks.imports.program import take_program as take

    return take(config, Settings.from_environment().store)


@task(name="take-rows", **_POLICY)
def take_rows(config: RowsConfig) -> PreparedRows:
    """Take rows that were prepared elsewhere.

    Safe to retry: the file appears whole, under a key of its content, or not at all.

    Raises:
        ConfigurationError: the file is not there, or is no Parquet. Not retried.
        DataContractError: it lacks one of the two parts. Not retried.
    """
    from tasks.imports.rows import take_rows as take

    return take(config, Settings.from_environment().store)


@task(
    name="encode-columns",
    task_run_name="encode-{snapshot.window.slug}",
    **uncached(4 * 3600, kept=True),
)
def encode_columns(snapshot: FeatureSnapshot, encoded: dict[str, EncodedColumn]) -> FeatureSnapshot:
    """Turn a training set's columns of texts and images into numbers.

    Safe to retry: the new rows appear whole, under a key of their content, or not at all.

    Raises:
        ConfigurationError: an encoder is not there, or gives fewer numbers. Not retried.
        DataContractError: a value is no text, or no image. Not retried.
    """
    from tasks.imports.encoded import encode_snapshot

    settings = Settings.from_environment()
    return encode_snapshot(snapshot, encoded, settings.feature_repo, settings.store)
