"""Drift checks of what was served: a real flow run, a registered champion, a log of its answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pandas as pd
import pytest
from prefect import flow, get_client

from flows.config import PipelineConfig, read_pipeline_config
from flows.drift_check import (
    check_served,
    check_served_by_volume,
    drift_check_log_flow,
    server_clock_offset,
)
from infra.orchestration.embedded import send_what_is_left
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.drift import DriftReport, DriftResult, TooFewPredictions
from tasks.control.retraining.ledger import Ledger
from tasks.evaluation.config import ServedDrift
from tasks.kernel.settings import Settings
from tasks.predictions.labels import import_labels
from tasks.registry.candidate import register_candidate
from tasks.registry.mlflow_registry import CHAMPION, Registry
from tasks.registry.task import find_champion
from tests.support.control import builders as evidence
from tests.support.data.builders import COLUMNS, YEAR, dataset, frame, month, rows_in, splits
from tests.support.evaluation.programs import LateRate, stored_program, trained_model
from tests.support.platform.deployed import deploy
from tests.support.registry import builders
from tests.support.registry.builders import migrated
from tests.support.services.prefect_platform import PrefectApi
from tests.support.serving.served_rows import log_frame, served

__all__ = ["migrated"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WINDOW = month(10)
FRAME = frame(8000)


@dataclass(frozen=True)
class Served:
    """A state folder with a champion."""

    settings: Settings
    config: PipelineConfig
    dataset: ValidatedDataset
    champion: str

    @property
    def home(self) -> Path:
        return self.settings.home

    def log(self, rows: pd.DataFrame, track: str = "stable") -> int:
        by = served(self.champion, track)  # type: ignore[arg-type]
        return log_frame(self.home, rows, server_clock_offset(self.config), by)

    def check(self) -> DriftReport | TooFewPredictions:
        return check_in_a_run(self.dataset, WINDOW, self.config)


@flow(name="check-served-rows")
def check_in_a_run(
    reference: ValidatedDataset, window: TimeWindow, config: PipelineConfig
) -> DriftReport | TooFewPredictions:
    """What `drift-check-log` does once it has the champion's reference."""
    champion = find_champion(config.registry)
    return check_served(champion, reference, window, config)


@pytest.fixture
def serving(
    prefect_api: PrefectApi, tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    settings = Settings.from_environment()
    world = builders.World.at(settings.home).with_database_of(migrated)
    store, location = world.store, world.location
    rows = dataset(store, FRAME)
    config = read_pipeline_config(settings.feature_repo)
    drift = config.drift.model_copy(update={"served": ServedDrift(min_rows=300)})
    config = config.model_copy(update={"window": YEAR, "splits": splits(), "drift": drift})
    trained = trained_model(stored_program(store, LateRate()).program, rows)
    judged = builders.evaluation(store, trained)
    ref = register_candidate(trained, judged, rows, config.registry, location, store, "abc1234")
    registry = Registry(location)
    registry.set_alias(registry.confirmed(ref), CHAMPION)
    with prefect_api.in_process():
        yield Served(settings, config, rows, str(ref.version))
        send_what_is_left()


def shifted(rows: pd.DataFrame) -> pd.DataFrame:
    """Most flights are of one carrier now, and half of them were late much more often."""
    late = rows["late_rate_24h"].where(rows.index % 2 == 0, rows["late_rate_24h"] + 0.3)
    carrier = rows["carrier"].where(rows.index % 10 < 3, "EV")
    return rows.assign(late_rate_24h=late, carrier=carrier)


def test_shifted_rows_have_drifted_and_the_controller_gets_the_window_of_the_log(
    serving: Served, tmp_path: Path
) -> None:
    rows = rows_in(WINDOW, FRAME)
    serving.log(shifted(rows))
    serving.log(rows, track="shadow")
    labels = pd.DataFrame(
        {"request_id": [f"r-{n}" for n in rows[COLUMNS.row_id]], "label": 1 - rows[COLUMNS.label]}
    )
    labels.to_parquet(tmp_path / "labels.parquet")
    name = serving.config.registry.model_name
    import_labels(serving.home, name, tmp_path / "labels.parquet", datetime.now(UTC))

    report = serving.check()

    assert isinstance(report, DriftReport)
    assert report.result is DriftResult.RETRAIN, report.evidence
    assert report.num_current_rows == len(rows), "answers of another track were taken"
    assert report.prediction.drifted
    drifted = {feature.feature for feature in report.features if feature.drifted}
    assert drifted == {"carrier", "late_rate_24h"}
    assert report.current_performance.num_rows == len(rows)
    ledger = Ledger(serving.settings.metadata_url)
    result = ledger.newest_result(name, serving.config.name)
    assert result.evidence.result is DriftResult.RETRAIN
    assert result.evidence.num_labelled == len(rows)
    assert f"{len(rows):,} of them with a label" in result.evidence.sentences[-1]


@flow(name="looking-at-what-was-served")
def look(config: PipelineConfig) -> str | None:
    """What each refresh of the newest hours does when it has finished."""
    return check_served_by_volume(config)


def test_enough_served_rows_start_one_check(serving: Served) -> None:
    served_drift = ServedDrift(min_rows=10, volume_rows=40)
    drift = serving.config.drift.model_copy(update={"served": served_drift})
    config = serving.config.model_copy(update={"drift": drift, "name": "served-by-volume"})
    parameters = {"window": None, "config": config.model_dump(mode="json")}
    with get_client(sync_client=True) as client:  # no worker: what is started stays scheduled
        name, pool = f"cpu-{config.name}", "served-by-volume"
        deployment = deploy(client, drift_check_log_flow, name, pool, parameters=parameters)
    newest = config.clock.newest_labelled(datetime.now(UTC))
    rows = FRAME.head(50).copy()
    rows[COLUMNS.event_time] = newest.end - pd.to_timedelta(range(50, 0, -1), unit="min")
    serving.log(rows.head(39))
    ledger = Ledger(serving.settings.metadata_url)
    before = evidence.stable(0).model_copy(
        update={"window": TimeWindow(start=newest.start, end=newest.end - timedelta(hours=2))}
    )
    ledger.store_result(config.registry.model_name, config.name, before, evidence.FREE)
    assert look(config) is None
    serving.log(rows.tail(11))
    run = look(config)
    assert run is not None
    assert look(config) == run, "the same rows started a second check"
    with get_client(sync_client=True) as client:
        started = client.read_flow_run(UUID(run))
    assert started.deployment_id == deployment
    assert TimeWindow.model_validate(started.parameters["window"]).end >= newest.end
