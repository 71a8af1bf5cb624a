"""Feature tasks: land raw rows, build feature tables, publish and materialize them, retrieve."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import INPUTS, RUN_ID
from prefect.runtime import flow_run

from tasks.contracts import data
from tasks.contracts.base import TimeWindow
from tasks.contracts.evaluation import FeatureRanking
from tasks.features.access.profile import import_feast
from tasks.features.checks.report import ParityReport
from tasks.features.config import FeatureConfig, MaterializationConfig
from tasks.governance.journal import Journal, on_behalf_of, process_identity
from tasks.governance.signing import find_signed
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import Settings

# These tasks are not cached by Prefect: what they make depends on files beside their inputs (raw
# files, queries, what is published), which the plain functions digest into their own keys. A
# finished result is found again in milliseconds.


def _published(settings: Settings) -> data.FeatureTables:
    from tasks.features.tables.build import current_tables

    return current_tables(settings.features_home, settings.store)


@task(name="land-raw-rows", task_run_name="land-{window.slug}", **uncached(1800))
def land_raw_rows(window: TimeWindow, config: FeatureConfig) -> data.LandedRows:
    """Copy the window's raw rows, typed, into the artifact store.

    Safe to retry: the copy is written aside and renamed.

    Raises:
        DataContractError: a column, type or time zone is not as declared. Not retried.
    """
    from tasks.features.tables.landing import land_raw_rows as land

    settings = Settings.from_environment()
    landed = land(window, config, settings.feature_repo, settings.store)
    rows = [{"table": t.name, "rows": t.num_rows} for t in landed.tables]
    create_table_artifact(rows, "landed-rows", f"Raw rows of {window}")
    return landed


@task(
    name="build-feature-tables",
    task_run_name="tables-{validated.landed.window.slug}",
    **uncached(3600),
)
def build_feature_tables(
    validated: data.ValidatedRows, config: FeatureConfig
) -> data.FeatureTables:
    """Compute the next version of all feature tables; nobody reads it before it is published.

    Safe to retry: a version is a folder of its own, renamed into place when whole.
    """
    from tasks.features.tables.build import build_feature_tables as build

    settings = Settings.from_environment()
    base = _published(settings)
    tables = build(validated, base, config, settings.feature_repo, settings.store)
    rows = [
        {"table": t.name, "rows": t.num_rows, "bytes": t.artifact.num_bytes} for t in tables.tables
    ]
    create_table_artifact(rows, "feature-tables", f"Feature tables, version {tables.version[:12]}")
    return tables


@task(name="publish-feature-tables", task_run_name="publish-{tables.version}", **uncached(60))
def publish_feature_tables(
    tables: data.FeatureTables, validations: tuple[data.ValidationResult, ...]
) -> data.FeatureTables:
    """Let readers see a version; the validation results vouch for every table of it.

    Safe to retry: one link moves in one step.

    Raises:
        DataContractError: a table has no validation result. Nothing is published.
    """
    from tasks.features.tables.build import publish_tables

    settings = Settings.from_environment()
    publish_tables(tables, validations, settings.features_home, settings.store)
    return tables


@task(name="materialize-features", task_run_name="materialize-{window.slug}", **uncached(3600))
def materialize_features(
    tables: data.FeatureTables,
    window: TimeWindow,
    config: MaterializationConfig = MaterializationConfig(),  # noqa: B008 (frozen)
) -> tuple[data.MaterializedView, ...]:
    """Bring the online store up to the end of the window.

    Safe to retry: of one table the newer values stay, and watermarks move last.
    """
    from tasks.features.tables.ledger import online_views

    settings = Settings.from_environment()
    views = online_views(tables, window, settings.features_home, settings.feature_repo)
    if views is None:
        import_feast()
        from tasks.features.online.materialization import materialize

        with on_behalf_of(flow_run.id):
            views = materialize(tables, window, settings, config)
    rows = [view.model_dump(mode="json") for view in views]
    reached = f"Online store up to {window.end:%Y-%m-%dT%H:%MZ}"
    create_table_artifact(rows, "materialized-views", reached)
    return views


@task(name="count-new-rows", task_run_name="count-{table}-{window.slug}", **uncached(300))
def count_new_rows(table: str, window: TimeWindow, config: FeatureConfig) -> int:
    """Rows of a published raw table in a window.

    Safe to retry: it only reads.

    Raises:
        ConfigurationError: the table has no time column. Not retried.
    """
    from tasks.features.tables.build import count_rows

    settings = Settings.from_environment()
    return count_rows(_published(settings), table, window, config, settings.store)


@task(name="build-training-set", task_run_name="training-set-{window.slug}", **uncached(3600))
def build_training_set(
    window: TimeWindow, config: FeatureConfig, tables: data.FeatureTables | None = None
) -> data.FeatureSnapshot:
    """Retrieve the window's labelled rows with the features known at each one's moment.

    Reads these tables; None: the published ones. Safe to retry: a snapshot is renamed into place
    when whole.

    Raises:
        ConfigurationError: the feature service does not exist. Not retried.
        SignatureError: the training set that is there is somebody else's. Not retried.
    """
    from tasks.features.tables.ledger import SNAPSHOTS, training_set_key

    settings = Settings.from_environment()
    tables = tables or _published(settings)
    key = training_set_key(tables, window, config, settings.feature_repo)
    snapshot = find_signed(settings.store, SNAPSHOTS, key, data.FeatureSnapshot)
    if snapshot is None:
        import_feast()
        from tasks.features.snapshot import build_training_set as build

        with on_behalf_of(flow_run.id):
            snapshot = build(tables, window, config, settings)
    rows: list[dict[str, Any]] = [{"rows": "with a label", "count": snapshot.num_rows}]
    rows += [{"rows": f"left out: {e.reason}", "count": e.num_rows} for e in snapshot.excluded]
    meaning = f"Snapshot {snapshot.data.sha256[:12]} of {window}: {snapshot.label_definition}"
    create_table_artifact(rows, "training-set", meaning)
    return snapshot


@task(
    name="rank-single-features",
    task_run_name="rank-features-{snapshot.window.slug}",
    **uncached(1800),
)
def rank_single_features(
    snapshot: data.FeatureSnapshot,
    splits: data.DataSplits,
    config: FeatureConfig,
    tables: data.FeatureTables | None = None,
) -> FeatureRanking:
    """Find the inputs that tell most about the label by themselves; none may be the label.

    Safe to retry: a ranking is kept whole under a key of its content.

    Raises:
        DataContractError: an input is the label, or was made from it. Not retried.
    """
    from tasks.features.checks.single_features import rank_single_features as rank

    settings = Settings.from_environment()
    ranking = rank(snapshot, tables or _published(settings), config, splits, settings.store)
    rows = [feature.model_dump(mode="json") for feature in ranking.features]
    meaning = "What single inputs tell about the label on the test rows"
    create_table_artifact(rows, "single-features", meaning)
    return ranking


@task(
    name="compare-online-with-offline",
    task_run_name="parity-{config.training_set.feature_service}",
    **uncached(1800),
)
def compare_online_with_offline(config: FeatureConfig) -> ParityReport:
    """Ask a sample of entities online and offline at the same moments, and compare bit by bit.

    Safe to retry: it only reads. Not cached: an online store changes without any input changing.

    Raises:
        FeatureStoreError: the published tables are not the ones that are online. Not retried.
    """
    import_feast()
    from tasks.features.checks.parity import check_parity

    settings = Settings.from_environment()
    with on_behalf_of(flow_run.id):
        report = check_parity(_published(settings), config, settings)
    rows = [view.model_dump(mode="json") for view in report.views]
    result = " ".join([f"Online and offline: {report.result}.", *report.evidence])
    create_table_artifact(rows, "feature-parity", result)
    if report.examples:
        rows = [example.model_dump(mode="json") for example in report.examples]
        unlike = "Values that are not the same online and offline"
        create_table_artifact(rows, "feature-parity-differences", unlike)
    return report


@task(
    name="record-act",
    task_run_name="audit-{action}",
    **{**uncached(60, kept=True), "cache_policy": RUN_ID + INPUTS},
)
def record_act(action: str, outcome: str, subject: dict[str, str], person: str | None) -> None:
    """Write a person's act into the audit trail, before it has an effect.

    Once a run, also where the run goes on after it waited. Retried after the disk refused, a line
    that was written may be there twice; it says the same.

    Args:
        action: what was done, such as `answer-promotion`.
        outcome: what was said.
        subject: on what, by kind.
        person: who says to have done it; None for nobody.
    """
    who = process_identity()
    if person is not None:
        who["subject"] = person  # as told: the server cannot know who clicked
    Journal(Settings.from_environment().home / "audit").append(
        action, outcome=outcome, subject=subject, who=who, flow_run=str(flow_run.id or "") or None
    )
