"""Refresh features: land one window, validate it, compute feature tables, bring them online."""

from prefect import flow
from prefect.events import emit_event

from flows.candidate import training_set, with_encoded
from flows.config import PipelineConfig, approved_suites, read_texts
from flows.drift_check import check_drift_by_volume, check_served_by_volume
from flows.stages import FOUND, RECORDED, check_places, hours_or_newest, run_name
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureRefresh, FeatureTables
from tasks.evaluation.task import check_test_window, monitor_features
from tasks.features import task as features
from tasks.features.checks.report import ParityReport
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.lineage.task import record_refresh
from tasks.validation import task as validation
from tasks.validation.suites import Suite, with_magnitudes


@flow(name="feature-refresh", flow_run_name=run_name("refresh", hours_or_newest), **RECORDED)
def feature_refresh_flow(window: TimeWindow | None, config: PipelineConfig) -> FeatureRefresh:
    """Make the window's features known, offline and online.

    A window that holds the use case's own is refreshed for training: then nothing is published
    before the training set that these tables give was retrieved and checked.

    Args:
        window: Rows whose time lies inside are landed anew; refused when it ends in the future.
            None: the newest complete hours, as the use case's clock says.
        config: The use case.
    """
    check_places(config)
    asked, window = window, hours_or_newest(window, config)
    settings = Settings.from_environment()
    suites, repo = approved_suites(config, settings), settings.feature_repo
    table_suites = bounded_suites(suites.tables, config)
    landed = features.land_raw_rows(window, config.features)
    rows = validation.validate_landed_rows(landed, suites.rows)
    built = features.build_feature_tables(rows, config.features)
    validations = validation.validate_feature_tables(built, window, table_suites)
    if window.contains(config.window):
        check_training_set(built, suites.training_set, config)
    tables = features.publish_feature_tables(built, validations)
    views = features.materialize_features(tables, window, config.features.materialization)
    monitoring = monitor_features(tables, window, config.view_keys, config.monitoring)
    announce_staleness(config.name, monitoring.newly_stale)
    refresh = FeatureRefresh(
        window=window,
        rows=rows,
        tables=tables,
        validations=validations,
        views=views,
        monitoring=monitoring,
    )
    texts = read_texts(config, repo)
    record_refresh(refresh, texts.tables, texts.staging, code_commit(), return_state=True)
    if asked is None:
        check_drift_by_volume(config)
        check_served_by_volume(config)
    return refresh


def bounded_suites(suites: dict[str, Suite], config: PipelineConfig) -> dict[str, Suite]:
    """Suite of each feature table, bounded by the magnitudes of the baseline where there is one."""
    baseline = config.monitoring.baseline
    if baseline is None:
        return suites
    spared = {t.name: (*t.entity_keys, *t.unbounded) for t in config.features.feature_tables}
    return {n: with_magnitudes(suite, baseline, spared[n]) for n, suite in suites.items()}


def check_training_set(tables: FeatureTables, suite: Suite, config: PipelineConfig) -> None:
    """Retrieve and check what is to be trained on; training finds it again in the store.

    Raises:
        DataContractError: nothing could be trained on these tables. They are not published.
    """
    snapshot = training_set(config, config.window, tables)
    dataset = validation.validate_training_set(
        snapshot, with_encoded(suite, snapshot), config.splits
    )
    check_test_window(dataset, config.splits, config.evaluation)
    features.rank_single_features(snapshot, config.splits, config.features, tables)


def announce_staleness(use_case: str, sentences: tuple[str, ...]) -> None:
    """Emit the event of stale features, where there is something to say."""
    if not sentences:
        return
    emit_event(
        "falaj.features.stale",
        resource={
            "prefect.resource.id": f"falaj.features.{use_case}",
            "prefect.resource.name": use_case,
        },
        payload={"use_case": use_case, "sentences": list(sentences)},
    )


@flow(name="parity-check", flow_run_name="parity-{config.name}", **FOUND)
def parity_check_flow(config: PipelineConfig) -> ParityReport:
    """Compare a sample of entities online and offline, at the moments the online store stands for.

    Args:
        config: The use case; its training set names the feature service.
    """
    check_places(config)
    return features.compare_online_with_offline(config.features)


def difference(report: ParityReport) -> FeatureStoreError:
    """What a person is told where online and offline are not the same."""
    more = "More of them are in artifact feature-parity-differences; " * bool(report.examples)
    return FeatureStoreError(
        f"online and offline features of {report.feature_service}: {report.result}. "
        f"{'. '.join(report.evidence)}. {more}`falaj features rebuild VIEW` writes a "
        "view online again from its table"
    )
