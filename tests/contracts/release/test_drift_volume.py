"""Drift checks by volume: really published rows start them on a real Prefect server, once."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pandas as pd
import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun

from flows.config import PipelineConfig, read_pipeline_config
from flows.drift_check import TAG, check_drift_by_volume, drift_check_flow, new_since
from infra.orchestration.embedded import send_what_is_left
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows
from tasks.control.retraining.ledger import Ledger
from tasks.evaluation.config import DriftVolume
from tasks.features.tables.build import EMPTY, build_feature_tables, publish_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings
from tests.support.control import builders
from tests.support.control.builders import FREE
from tests.support.data.repository import package_folder, vouched
from tests.support.platform.deployed import deploy
from tests.support.services.prefect_platform import PrefectApi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
POOL, USE_CASE, TABLE = "by-volume", "by-volume", "flights"
UNCHECKED = timedelta(hours=24)
"""Whole days, for at night hardly anybody flies."""


@pytest.fixture(scope="module")
def config() -> PipelineConfig:
    """The flights, as a use case that no other test deploys."""
    used = read_pipeline_config(Settings.from_environment({}).feature_repo)
    return with_limit(used.model_copy(update={"name": USE_CASE}), 100)


def with_limit(config: PipelineConfig, rows: int) -> PipelineConfig:
    drift = config.drift.model_copy(update={"volume": DriftVolume(table=TABLE, rows=rows)})
    return config.model_copy(update={"drift": drift})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A new state folder; its database of results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("FALAJ_DATABASE_URL", raising=False)
        yield Ledger(Settings.from_environment().metadata_url)


@pytest.fixture(scope="module")
def deployment(prefect_api: PrefectApi, config: PipelineConfig) -> Iterator[UUID]:
    """The drift check, on a pool without a worker: what is started there stays scheduled."""
    parameters = {"window": None, "config": config.model_dump(mode="json")}
    with prefect_api.in_process():
        with get_client(sync_client=True) as client:
            name = f"cpu-{USE_CASE}"
            yield deploy(client, drift_check_flow, name, POOL, parameters=parameters)
        send_what_is_left()


def started(deployment: UUID) -> list[FlowRun]:
    """Runs of the deployment that rows have started."""
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[TAG])),
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])),
        )


@flow(name="looking-at-volume")
def look(config: PipelineConfig) -> str | None:
    """What each refresh of the newest hours does when it has finished."""
    return check_drift_by_volume(config)


def store_result(ledger: Ledger, config: PipelineConfig, end: datetime, number: int) -> None:
    """A result on the use case's model that looked at rows until `end`."""
    window = TimeWindow(start=end - timedelta(days=28), end=end)
    seen = builders.stable(number).model_copy(update={"window": window})
    ledger.store_result(config.registry.model_name, config.name, seen, FREE)


def rows_between(start: datetime, end: datetime) -> int:
    """Counted in the package's own file, by another library."""
    rows = pd.read_csv(package_folder() / "flights.csv.zip", usecols=["time_hour"])
    moments = pd.to_datetime(rows["time_hour"], utc=True)
    return int(((moments >= start) & (moments < end)).sum())


@pytest.fixture(scope="module")
def window(home: Ledger, config: PipelineConfig) -> TimeWindow:
    """The newest hours, landed and published as a refresh does."""
    newest, settings = config.clock.newest_hours(datetime.now(UTC)), Settings.from_environment()
    landed = land_raw_rows(newest, config.features, settings.feature_repo, settings.store)
    tables = build_feature_tables(
        vouched(landed), EMPTY, config.features, settings.feature_repo, settings.store
    )
    results = vouched(LandedRows(window=newest, tables=tables.tables)).validations
    publish_tables(tables, results, settings.features_home, settings.store)
    return newest


def test_enough_rows_after_the_newest_result_start_one_check(
    deployment: UUID, home: Ledger, config: PipelineConfig, window: TimeWindow
) -> None:
    checked = config.clock.newest_labelled(datetime.now(UTC)).end - UNCHECKED
    store_result(home, config, checked, 0)
    assert look(config) is not None
    [run] = started(deployment)
    assert run.deployment_id == deployment
    asked = TimeWindow.model_validate(run.parameters["window"])
    assert asked.end == window.end - timedelta(hours=config.clock.label_hours)
    assert asked.end - asked.start == timedelta(days=config.clock.drift_days)
    assert run.parameters["config"]["name"] == USE_CASE

    num_rows = rows_between(checked, asked.end)
    assert look(with_limit(config, num_rows)) is not None
    assert look(with_limit(config, num_rows + 1)) is None
    assert look(config) == str(run.id), "the same rows started a second check"
    assert len(started(deployment)) == 2  # by the limit of 100 rows, and by that of all rows

    store_result(home, config, asked.end, 1)  # what the check that was started does
    assert look(with_limit(config, 1)) is None
    assert len(started(deployment)) == 2


def test_recorded_data_that_is_played_from_its_start_counts_from_there(
    home: Ledger, config: PipelineConfig
) -> None:
    """At the turn of the year the newest result is of a time that the clock will show again."""
    moment = config.clock.shows(datetime.now(UTC))
    window = config.clock.newest_labelled(datetime.now(UTC))
    store_result(home, config, moment + timedelta(days=30), 2)
    last = home.newest_result(config.registry.model_name, config.name)
    assert new_since(last, window, moment) == window.start


def test_nothing_is_counted_before_the_first_result_or_without_a_limit(
    deployment: UUID, home: Ledger, config: PipelineConfig
) -> None:
    registry = config.registry.model_copy(update={"model_name": "never-judged"})
    assert look(config.model_copy(update={"registry": registry})) is None
    unlimited = config.drift.model_copy(update={"volume": None})
    assert look(config.model_copy(update={"drift": unlimited, "name": "elsewhere"})) is None


def test_a_use_case_whose_drift_check_is_not_deployed_is_told(
    deployment: UUID, home: Ledger, config: PipelineConfig
) -> None:
    with pytest.raises(ConfigurationError, match="no deployment of 'drift-check' is of use case"):
        look(config.model_copy(update={"name": "elsewhere"}))
