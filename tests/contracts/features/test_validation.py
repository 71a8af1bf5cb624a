"""The gates under a real Prefect API: cached by content, shown in the UI, never retried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import Artifact, TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from tasks.contracts.data import (
    FeatureSnapshot,
    FeatureTables,
    LandedRows,
    ValidatedRows,
    ValidationResult,
)
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, build_feature_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.validation.outcome import read_outcome
from tasks.validation.runner import validate_snapshot, validate_tables
from tasks.validation.suites import Suite, read_suite, read_suites
from tasks.validation.task import (
    validate_landed_rows,
)
from tests.support.data.repository import SmallRepository, days, vouched
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
from tests.support.host.processes import wait_until
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

RAW_TABLES = ("flights", "weather", "planes", "airports")


@pytest.fixture
def settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_prefect: None
) -> Iterator[Settings]:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: str(tmp_path / "results")}):
        yield Settings.from_environment()


@task
def build_on(rows: ValidatedRows) -> int:
    return len(rows.validations)


@flow(name="rows-under-test")
def rows_flow(landed: LandedRows, suites: dict[str, Suite]) -> tuple[ValidatedRows, int]:
    rows = validate_landed_rows(landed, suites)
    return rows, build_on(rows)


def shown(key: str) -> list[Artifact]:
    """Every artifact that was ever shown under a key."""
    with get_client(sync_client=True) as client:
        return client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )


def table_of(artifact: Artifact) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(str(artifact.data))
    return rows


def task_runs() -> list[TaskRun]:
    """Those of the newest run of `rows_flow`."""
    with get_client(sync_client=True) as client:
        (newest,) = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["rows-under-test"])),
            sort=FlowRunSort.START_TIME_DESC,
            limit=1,
        )
        only = FlowRunFilter(id=FlowRunFilterId(any_=[newest.id]))
        return client.read_task_runs(flow_run_filter=only)


def test_real_rows_pass_the_gate_and_are_judged_once(settings: Settings) -> None:
    landed = LandedRows(
        window=WEEK, tables=tuple(real_table(settings.store, name) for name in RAW_TABLES)
    )
    suites = read_suites(REPO, {name: f"raw_{name}" for name in RAW_TABLES})

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


@proves(Promise.VALIDATED, "the flow ends at the refused table; nothing after it ran")
def test_a_refused_table_stops_the_flow_at_once_and_is_shown(settings: Settings) -> None:
    landed = LandedRows(
        window=WEEK, tables=(store_table(settings.store, people().assign(age=200.0)),)
    )

    with pytest.raises(DataContractError, match="age has 40 values outside 0 to 120"):
        rows_flow(landed, {"people": suite()})

    wait_until(lambda: bool(task_runs()), "the server has the task run")
    [run] = task_runs()
    assert run.run_count == 1  # permanent: never retried, and nothing was built on it
    latest = max(shown("validation-people"), key=lambda artifact: str(artifact.created))
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
        return read_suites(REPO, {t.name: f"feature_{t.name}" for t in self.tables.tables})

    def validate(self, tables: FeatureTables) -> tuple[ValidationResult, ...]:
        return validate_tables(tables.tables, self.suites(), days(0, 10), self.store, "Nothing")

    def refusal_of_table(self, name: str, change: str) -> str:
        [good] = [table for table in self.tables.tables if table.name == name]
        bad = spoiled(self.store, name, self.store.path(good.artifact), change)
        tables = self.tables.model_copy(update={"tables": (bad,)})
        with pytest.raises(DataContractError) as caught:
            self.validate(tables)
        return str(caught.value)

    def refusal_of_snapshot(self, change: str) -> str:
        bad = spoiled(self.store, "snapshot", self.store.path(self.snapshot.data), change)
        snapshot = self.snapshot.model_copy(update={"data": bad.artifact, "num_rows": bad.num_rows})
        with pytest.raises(DataContractError) as caught:
            validate_snapshot(snapshot, read_suite(REPO, "training_set"), self.store)
        return str(caught.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    repository = SmallRepository(tmp_path_factory.mktemp("repository"), num_days=10)
    home = tmp_path_factory.mktemp("home")
    store, config, path = ArtifactStore(home / "artifacts"), repository.config, repository.path
    landed = land_raw_rows(days(0, 10), config, path, store)
    tables = build_feature_tables(vouched(landed), EMPTY, config, path, store)
    snapshot = build_training_set(tables, days(1, 9), config, home, path, store)
    return Made(store, tables, snapshot)


def test_feature_tables_of_real_rows_pass(made: Made) -> None:
    results = made.validate(made.tables)

    assert {result.subject for result in results} == set(made.suites())


def test_a_training_set_of_real_rows_passes_with_its_leak_guards_judged(made: Made) -> None:
    vouched_for = validate_snapshot(made.snapshot, read_suite(REPO, "training_set"), made.store)

    outcome = read_outcome(made.store.path(vouched_for.validation.result))
    judged = {check.table for check in outcome.checks if check.status == "passed"}
    assert {"subject", "leaks", "labels", "missing", "ordering"} <= judged


TABLE_FAULTS = {
    "values in the store before their moment": (
        "origin_stats",
        "SELECT * REPLACE (event_timestamp AS created) FROM rows",
        "publication_lag_minutes has",
    ),
    "a longer horizon that saw less": (
        "route_stats",
        "SELECT * REPLACE (landed_28d AS landed_7d, landed_7d AS landed_28d) FROM rows",
        "horizons_out_of_order is true in",
    ),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_a_fault_of_a_feature_table_is_called_by_its_name(made: Made, fault: str) -> None:
    name, change, words = TABLE_FAULTS[fault]

    assert words in made.refusal_of_table(name, change)


SNAPSHOT_FAULTS = {
    "the outcome under another name": (
        "SELECT * REPLACE ((is_late * 30 + hash(flight_id) % 20)::FLOAT "
        "AS plane_history__last_dep_delay) FROM rows",
        "single_feature_auc has 1 value above 0.82, for example 1 "
        "(feature 'plane_history__last_dep_delay')",
    ),
    "a null that tells the outcome": (
        "SELECT * REPLACE (CASE WHEN is_late = 0 THEN weather__wind_gust ELSE NULL END "
        "AS weather__wind_gust, CASE WHEN is_late = 0 THEN planes__seats ELSE NULL END "
        "AS planes__seats, CASE WHEN is_late = 1 THEN NULL ELSE weather__pressure END "
        "AS weather__pressure) FROM rows",
        "(feature 'weather__pressure is missing')",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", SNAPSHOT_FAULTS)
def test_a_fault_of_a_training_set_is_called_by_its_name(made: Made, fault: str) -> None:
    change, words = SNAPSHOT_FAULTS[fault]

    message = made.refusal_of_snapshot(change)

    assert words in message
    assert "Nothing was trained" in message
