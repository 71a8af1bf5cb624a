"""Prefect tasks of the conversion."""

from prefect import task
from prefect.artifacts import create_table_artifact

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.evaluation import FitOutcome
from tasks.contracts.release import BuiltVariant, CalibrationSource, ModelVariant, RegisteredProgram
from tasks.contracts.training import RecalibratedModel
from tasks.conversion.config import TRITON_FILES, ConversionConfig
from tasks.conversion.targets.catalog import format_of, with_sources
from tasks.conversion.targets.interface import ConversionJob, converter_of
from tasks.conversion.variants import build_variant as build_files
from tasks.conversion.variants import failed_variant
from tasks.kernel.errors import ArtifactError, ConversionError, FalajError, StorageError
from tasks.kernel.retry_policy import reused
from tasks.kernel.settings import Settings

STORED = reused(__file__, 900)
"""Each task is safe to repeat, and its result is reused for equal inputs and code."""


@task(name="build-variant", task_run_name="build-v{program.version.version}-{name}", **STORED)
def build_variant(
    name: str,
    program: RegisteredProgram,
    sources: tuple[BuiltVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
    equipment: dict[str, str],
) -> BuiltVariant:
    """Build one variant of a registered program, on a machine with the equipment it has to have.

    Safe to retry: the files appear whole, under a key of their content, or not at all, and what
    calibrates is seeded.

    Raises:
        ArtifactError: the program, a source or the rows are absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    job = ConversionJob(program, rows, config, Settings.from_environment().store)
    return build_files(format_of(name), job, sources)


def build_variants(
    program: RegisteredProgram, rows: ConversionRows, config: ConversionConfig
) -> tuple[BuiltVariant, ...]:
    """A task run for each format and for all that it is made from, each after its sources.

    One after the other: exporters and quantisers change the state of the whole process while they
    work. What fails for a reason of its own, such as a damaged file, is a variant that was not
    built; the others are built all the same.

    Raises:
        StorageError: the disk refused one of them, which says nothing about the variant. The others
            are built and stored: the next run has only the refused ones to build.
    """
    built: dict[str, BuiltVariant] = {}
    refusal: StorageError | None = None
    for made in with_sources(config.formats):
        sources = tuple(built[name] for name in made.made_from)
        try:
            equipment = converter_of(made).equipment(made)
        except ConversionError as exc:  # no run of a task: it would be remembered
            built[made.name] = failed_variant(made, str(exc))
            continue
        state = build_variant(
            made.name, program, sources, rows, config, equipment, return_state=True
        )
        result = state.result(raise_on_failure=False)
        if isinstance(result, BuiltVariant):
            built[made.name] = result
        elif isinstance(result, FalajError):
            built[made.name] = failed_variant(made, str(result))
            if isinstance(result, StorageError):
                refusal = refusal or result
        else:
            state.result()  # an error that nobody foresaw: it is raised as it is
    if refusal is not None:
        raise refusal
    return tuple(built.values())


@task(name="map-program", task_run_name="map-v{source.program.version.version}", **STORED)
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
    from tasks.conversion import calibrator

    assert outcome.fit is not None
    store = Settings.from_environment().store
    return calibrator.map_program(source, outcome.fit, dataset, splits, store)


def judge_variants(
    program: RegisteredProgram,
    built: tuple[BuiltVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
) -> tuple[ModelVariant, ...]:
    """Judge the variants in a task run. A damaged one counts as one that could not be built.

    So the stored decision holds for the files that it names: files that are built again are judged
    again.
    """
    store, whole = Settings.from_environment().store, []
    for one in built:
        try:
            if one.files is not None:
                store.path(one.files)
            whole.append(one)
        except ArtifactError as exc:
            whole.append(failed_variant(format_of(one.name), str(exc)))
    return judge_built(program, tuple(whole), rows, config)


@task(
    name="judge-variants",
    task_run_name="judge-v{program.version.version}-on-{config.hardware_class}",
    **STORED,
)
def judge_built(
    program: RegisteredProgram,
    built: tuple[BuiltVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
) -> tuple[ModelVariant, ...]:
    """Accept or drop every variant, by parity, task metric and measured speed.

    Safe to retry: it only reads and measures. Latency is a measurement of one moment on one
    machine. Reusing it is right while model, variants, rows and code are the same. Parity and AUC
    do not depend on the moment.

    Raises:
        ArtifactError: program or rows are absent or damaged. Not retried.
        DataContractError: the rows cannot judge: none, or labels that are all equal. Not retried.
    """
    from tasks.conversion.convert import judge_variants as judge

    variants = judge(ConversionJob(program, rows, config, Settings.from_environment().store), built)
    create_table_artifact(
        table=latency_table(variants),
        key="model-variants",
        description=f"Variants of `{program.version.name}` version "
        f"{program.version.version} on {config.hardware_class}, {config.threads} thread(s): what "
        "was accepted, and why.",
    )
    return variants


@task(
    name="write-triton-repository",
    task_run_name="triton-v{program.version.version}-{variant.name}",
    **STORED,
)
def write_triton_repository(
    program: RegisteredProgram,
    variant: ModelVariant,
    rows: ConversionRows,
    config: ConversionConfig,
) -> ModelVariant:
    """Write the model repository from which Triton serves an accepted variant.

    Safe to retry: the repository appears whole, under a key of its content, or not at all.

    Raises:
        ArtifactError: the variant or the rows are absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.conversion.triton.repository import with_repository

    job = ConversionJob(program, rows, config, Settings.from_environment().store)
    return with_repository(job, variant)


def add_triton_repositories(
    program: RegisteredProgram,
    variants: tuple[ModelVariant, ...],
    rows: ConversionRows,
    config: ConversionConfig,
) -> tuple[ModelVariant, ...]:
    """A task run for each accepted variant that Triton serves, where that is asked for."""
    return tuple(
        write_triton_repository(program, variant, rows, config)
        if config.triton is not None and variant.accepted and variant.format in TRITON_FILES
        else variant
        for variant in variants
    )


def latency_table(variants: tuple[ModelVariant, ...]) -> list[dict[str, str]]:
    """One row a variant: decision, agreement, latency and ratio to PyTorch eager by batch size."""

    def shown(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3g}"

    return [
        {
            "variant": one.name,
            "decision": "accepted" if one.accepted else "dropped",
            "largest gap": shown(one.parity_max),
            f"{one.quality_name} change": shown(
                one.quality_change.value if one.quality_change else None
            ),
            "serves": ", ".join(one.serves) or "nothing",
            "rows/s, all cores": shown(one.throughput.rows_per_s.value if one.throughput else None),
            **{
                f"ms at batch {at.batch_rows} (of PyTorch's)": (
                    f"{at.p50_ms:.3f} ({at.ratio_to_eager:.2f})"
                )
                for at in one.latencies
            },
            "reason": one.reason,
        }
        for one in variants
    ]
