"""The gates under a real Prefect API: cached by content, shown in the UI, never retried."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact, TaskRun

from flows.config import read_pipeline_config
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    FeatureSnapshot,
    FeatureTables,
    LandedRows,
    ValidatedRows,
    ValidationResult,
)
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.validation.outcome import read_outcome
from tasks.validation.runner import validate_snapshot, validate_table, validate_tables
from tasks.validation.suites import Suite, read_suite
from tasks.validation.task import validate_landed_rows
from tests.support.data.installation import Refreshed
from tests.support.data.repository import days
from tests.support.data.tables import (
    REPO,
    WEEK,
    between,
    people,
    real_table,
    spoiled,
    store_table,
    suite,
)
from tests.support.data.use_cases import TRAFFIC
from tests.support.host.processes import wait_until
from tests.support.services.prefect_platform import shown
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

RAW_TABLES = ("flights", "weather", "planes", "airports")


@task
def build_on(rows: ValidatedRows) -> int:
    return len(rows.validations)


@flow(name="rows-under-test")
def rows_flow(landed: LandedRows, suites: dict[str, Suite]) -> tuple[ValidatedRows, int]:
    rows = validate_landed_rows(landed, suites)
    return rows, build_on(rows)


def table_of(artifact: Artifact) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(str(artifact.data))
    return rows


def task_runs(flow_run: Any) -> list[TaskRun]:
    with get_client(sync_client=True) as client:
        only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
        return client.read_task_runs(flow_run_filter=only)


@pytest.mark.usefixtures("on_prefect")
def test_real_rows_pass_the_gate_and_are_judged_once(settings: Settings) -> None:
    landed = LandedRows(
        window=WEEK, tables=tuple(real_table(settings.store, name) for name in RAW_TABLES)
    )
    suites = {name: read_suite(REPO, f"raw_{name}") for name in RAW_TABLES}

    rows, count = rows_flow(landed, suites)

    assert [result.subject for result in rows.validations] == list(RAW_TABLES)
    assert count == 4
    [artifact] = shown("validation-raw-flights")
    first, *rest = table_of(artifact)
    assert first["expectation"] == "expect_compound_columns_to_be_unique"
    assert first["observed"] == "none of 6,546 unexpected"
    assert {row["outcome"] for row in (first, *rest)} == {"passed"}

    assert rows_flow(landed, suites) == (rows, count)
    assert len(shown("validation-raw-flights")) == 1


@pytest.mark.usefixtures("on_prefect")
def test_a_changed_suite_is_judged_again_and_a_removed_result_is_made_again(
    settings: Settings,
) -> None:
    landed = LandedRows(window=WEEK, tables=(store_table(settings.store, people()),))
    before = len(shown("validation-people"))
    for high in (100, 100, 101):
        rows, _ = rows_flow(landed, {"people": suite(between("age", 0, high))})
    assert len(shown("validation-people")) == before + 2
    settings.store.path(rows.validations[0].result).unlink()
    assert rows_flow(landed, {"people": suite(between("age", 0, 101))})[0] == rows
    assert settings.store.holds(rows.validations[0].result)


@pytest.mark.usefixtures("on_prefect")
@proves(Promise.VALIDATED, "the flow ends at the refused table; nothing after it ran")
def test_a_refused_table_stops_the_flow_at_once_and_is_shown(settings: Settings) -> None:
    landed = LandedRows(
        window=WEEK, tables=(store_table(settings.store, people().assign(age=200.0)),)
    )

    state = rows_flow(landed, {"people": suite()}, return_state=True)

    with pytest.raises(DataContractError, match="age has 40 values outside 0 to 120"):
        state.result()
    flow_run = state.state_details.flow_run_id
    wait_until(lambda: bool(task_runs(flow_run)), "the server has the task run")
    [run] = task_runs(flow_run)
    assert run.run_count == 1  # permanent: never retried, and nothing was built on it
    latest = shown("validation-people")[-1]
    assert [row["outcome"] for row in table_of(latest)] == ["failed"]
    assert "people: refused" in str(latest.description)
    assert "age has 40 values outside 0 to 120" in str(latest.description)


# What the features room really makes


@dataclass
class Made:
    """Ten days of January: feature tables and a training set, made as the flows make them."""

    store: ArtifactStore
    tables: FeatureTables
    snapshot: FeatureSnapshot

    def suites(self) -> dict[str, Suite]:
        return {t.name: read_suite(REPO, f"feature_{t.name}") for t in self.tables.tables}

    def validate(self, tables: FeatureTables) -> tuple[ValidationResult, ...]:
        return validate_tables(tables.tables, self.suites(), days(0, 10), self.store, "Nothing")

    def refusal_of_snapshot(self, change: str) -> str:
        bad = spoiled(self.store, "snapshot", self.store.path(self.snapshot.data), change)
        snapshot = self.snapshot.model_copy(update={"data": bad.artifact, "num_rows": bad.num_rows})
        with pytest.raises(DataContractError) as caught:
            validate_snapshot(snapshot, read_suite(REPO, "training_set"), self.store)
        return str(caught.value)


@pytest.fixture(scope="module")
def made(ten_days: Refreshed) -> Made:
    installation, tables = ten_days
    return Made(installation.store, tables, installation.snapshot(tables, days(1, 9)))


def test_feature_tables_of_real_rows_pass(made: Made) -> None:

    assert {result.subject for result in made.validate(made.tables)} == set(made.suites())


def test_a_training_set_of_real_rows_passes_with_its_leak_guards_judged(made: Made) -> None:
    vouched_for = validate_snapshot(made.snapshot, read_suite(REPO, "training_set"), made.store)

    outcome = read_outcome(made.store.path(vouched_for.validation.result))
    judged = {check.table for check in outcome.checks if check.status == "passed"}
    assert {"subject", "leaks", "labels", "missing", "ordering"} <= judged


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("origin_stats", "event_timestamp AS created", "publication_lag_minutes has"),
        (
            "route_stats",
            "landed_28d AS landed_7d, landed_7d AS landed_28d",
            "horizons_out_of_order is true in",
        ),
    ],
)
def test_values_that_cannot_be_of_their_moment_are_refused(
    made: Made, name: str, change: str, said: str
) -> None:
    (good,) = (table for table in made.tables.tables if table.name == name)
    change = f"SELECT * REPLACE ({change}) FROM rows"
    bad = spoiled(made.store, good.name, made.store.path(good.artifact), change)
    with pytest.raises(DataContractError, match=said):
        made.validate(made.tables.model_copy(update={"tables": (bad,)}))


@pytest.mark.slow
def test_the_outcome_under_another_name_or_in_nulls_is_called_by_its_name(made: Made) -> None:
    change = (
        "SELECT * REPLACE ((is_late * 30 + hash(flight_id) % 20)::FLOAT "
        "AS plane_history__last_dep_delay) FROM rows"
    )
    message = made.refusal_of_snapshot(change)
    assert "single_feature_auc has 1 value above 0.82, for example 1" in message
    assert "(feature 'plane_history__last_dep_delay')" in message
    assert "Nothing was trained" in message
    change = (
        "SELECT * REPLACE (CASE WHEN is_late = 0 THEN weather__wind_gust END AS weather__wind_gust,"
        " CASE WHEN is_late = 0 THEN weather__pressure END AS weather__pressure) FROM rows"
    )
    assert "(feature 'weather__pressure is missing')" in made.refusal_of_snapshot(change)


# Raw counts of the second use case, on windows of any length

TRAFFIC_FEATURES = read_pipeline_config(TRAFFIC).features
EVENING = datetime.fromisoformat("2017-11-19T18:00:00+00:00")


def check_traffic(hours: int, folder: Path, lost: int = 0) -> None:
    """Land a window, lose the first of its counts, and ask the suite."""
    store = ArtifactStore(folder / "artifacts")
    window = TimeWindow(start=EVENING - timedelta(hours=hours), end=EVENING)
    (table,) = land_raw_rows(window, TRAFFIC_FEATURES, TRAFFIC, store).tables
    rows = pd.read_parquet(store.path(table.artifact))
    rows.loc[rows.index[:lost], ["traffic_volume", "temp"]] = None
    suite = read_suite(TRAFFIC, TRAFFIC_FEATURES.raw_tables[0].suite)
    validate_table(store_table(store, rows), suite, window, store, "Nothing")


@pytest.mark.parametrize("hours", [1, 48, 167, 168, 336])
def test_counts_of_a_window_of_any_length_pass(tmp_path: Path, hours: int) -> None:
    """An hourly refresh looks at two days; a share of a week's hours says nothing of them."""
    check_traffic(hours, tmp_path)


def test_a_week_that_was_hardly_counted_is_refused(tmp_path: Path) -> None:
    check_traffic(168, tmp_path / "whole", lost=20)
    with pytest.raises(DataContractError, match="of a week's hours at least four in five"):
        check_traffic(168, tmp_path / "lost", lost=60)
