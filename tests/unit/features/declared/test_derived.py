"""What follows from a use case's columns, and what it is like when all of it runs."""

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from feast import Entity, FeatureService, FeatureView
from feast.permissions.permission import Permission

from flows.config import PipelineConfig, Suites, read_pipeline_config, suites_of
from tasks.contracts.data import FeatureSnapshot, FeatureTables
from tasks.features.access.store import load_definitions
from tasks.features.access.versions import view_definition
from tasks.features.checks.verification import verify_snapshot
from tasks.features.declared.columns import read_features, table_shapes
from tasks.features.declared.queries import frame_query
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, build_feature_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.features.tables.ledger import definitions_digest
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore, Settings, StagedFolder
from tasks.validation.derived import base_suite
from tasks.validation.runner import validate_snapshot, validate_tables
from tests.support.data.declared import FEATURES, TRAINING_SET, USE_CASE, write_rows, write_use_case
from tests.support.data.repository import vouched

FLIGHTS = PROJECT_ROOT / "feature_repo" / "flights"
WRITTEN = PROJECT_ROOT / "tests" / "support" / "data" / "flights"


def of_kind(objects: list[Any], kind: type) -> dict[str, Any]:
    return {o.name: o for o in objects if isinstance(o, kind)}


def test_derived_definitions_of_the_flights_are_those_that_a_person_wrote() -> None:
    written, derived = load_definitions(WRITTEN), load_definitions(FLIGHTS)
    views = of_kind(written, FeatureView)
    names = {"destination": "dest", "plane": "tailnum"}  # an entity is called as its column
    for name, view in of_kind(derived, FeatureView).items():
        own = {**view_definition(views[name])}
        own["entities"] = sorted(names.get(e, e) for e in views[name].entities)
        assert view_definition(view) == own
    services = (of_kind(o, FeatureService)["flight_delay_v1"] for o in (written, derived))
    assert len({tuple(p.name for p in s.feature_view_projections) for s in services}) == 1
    keys = [sorted(e.join_key for e in of_kind(o, Entity).values()) for o in (written, derived)]
    assert keys[0] == keys[1]
    permissions = [of_kind(o, Permission).values() for o in (written, derived)]
    for one, other in zip(*permissions, strict=True):
        assert one.to_proto() == other.to_proto()


def test_columns_are_inputs_by_their_kind_and_what_is_said_stays(tmp_path: Path) -> None:
    spec = read_features(write_use_case(tmp_path / "plain"))[1].training_set
    assert (spec.row_id, spec.feature_service) == ("order_id", "mail_order_v1")
    assert (spec.categorical, spec.numeric) == (("channel", "gift"), ("amount",))
    changed = {**TRAINING_SET, "numeric": [], "ignore": ["gift"], "label_definition": "sent back"}
    repo = write_use_case(tmp_path / "own", features={**FEATURES, "training_set": changed})
    spec = read_features(repo)[1].training_set
    assert (spec.categorical, spec.numeric) == (("channel",), ())
    assert spec.label_definition == "sent back"


def test_a_model_beside_the_use_case_leaves_its_definitions_derived(tmp_path: Path) -> None:
    repo = write_use_case(tmp_path)
    before = definitions_digest(repo)
    (repo / "my_model.py").write_text("import torch\n")
    assert definitions_digest(repo) == before
    (repo / "definitions.py").write_text("from feast import Entity\n")
    assert definitions_digest(repo) != before


def encoded(folder: Path, column: str, **changes: Any) -> Path:
    spec = {**TRAINING_SET, "encoded": {column: {"text": "words"}}, **changes}
    return write_use_case(folder, features={**FEATURES, "training_set": spec})


def test_an_encoded_column_is_a_text_and_no_category(tmp_path: Path) -> None:
    spec = read_features(encoded(tmp_path, "channel"))[1].training_set
    assert (spec.categorical, spec.numeric) == (("gift",), ("amount",))
    for column, seen in (("note", "is no column"), ("amount", "is DOUBLE")):
        with pytest.raises(ConfigurationError, match=f"names {column}, which {seen} of orders"):
            read_features(encoded(tmp_path, column))
    with pytest.raises(ConfigurationError, match="channel is encoded, and among categorical"):
        read_features(encoded(tmp_path, "channel", categorical=["channel"]))


def test_a_use_case_said_once_is_whole_as_the_parameter_of_a_flow(tmp_path: Path) -> None:
    config = read_pipeline_config(write_use_case(tmp_path))
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config
    assert str(config.window) == "2024-01-01T00:00Z to 2024-07-01T00:00Z"
    assert str(config.splits.validation) == "2024-05-01T00:00Z to 2024-06-01T00:00Z"
    assert str(config.current) == "2024-06-01T00:00Z to 2024-06-17T01:00Z"  # labels are known
    assert (config.registry.model_name, config.registry.experiment) == ("mail-order",) * 2
    assert config.clock.label_hours == 14 * 24 - 1


def test_days_begin_in_the_zone_of_the_clock(tmp_path: Path) -> None:
    repo = write_use_case(tmp_path, clock={"time_zone": "Asia/Muscat"})
    assert str(read_pipeline_config(repo).window) == "2023-12-31T20:00Z to 2024-06-30T20:00Z"


@pytest.mark.parametrize(
    ("splits", "told"),
    [
        ({"starts": "2024-01-01"}, "splits or clock: starts: Extra inputs are not permitted"),
        ({"start": "soon"}, "start: Input should be a valid datetime"),
        ({"start": "2024-05-02"}, "start before end"),
        ({"start": "2024-01-01T05:00"}, "has no time zone"),
    ],
)
def test_short_splits_that_cannot_be_are_told(
    tmp_path: Path, splits: dict[str, str], told: str
) -> None:
    given = {**USE_CASE["splits"], **splits}
    with pytest.raises(ConfigurationError, match=told):
        read_pipeline_config(write_use_case(tmp_path, splits=given))


def test_what_decides_derived_definitions_decides_their_digest(tmp_path: Path) -> None:
    repo = write_use_case(tmp_path)
    seen = [definitions_digest(repo), definitions_digest(write_use_case(tmp_path))]
    habits, customers = FEATURES["feature_tables"]
    for changed in ({"aggregates": ["count() over 7d"]}, {"ttl_hours": 5}):
        tables = [{**habits, **changed}, customers]
        write_use_case(tmp_path, features={**FEATURES, "feature_tables": tables})
        seen.append(definitions_digest(repo))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_features_may_be_from_a_staging_table_and_columns_may_be_called_as_sql_words(
    tmp_path: Path,
) -> None:
    def query(amount: str) -> None:
        (tmp_path / "web.sql").write_text(
            f'SELECT order_id, customer AS "end", ordered, channel, {amount} AS amount, '
            "returned, FROM orders WHERE channel = 'web'"
        )

    staging = {"name": "web", "sql": "web.sql", "time_column": "ordered", "key": ["order_id"]}
    seen = {"name": "seen", "from": "web", "entity_keys": ["end"], "ttl_hours": 5}
    summed = {**seen, "name": "summed", "aggregates": ["sum(amount) over 7d"]}
    parts = {
        **{"raw_tables": FEATURES["raw_tables"], "staging": [staging]},
        **{"feature_tables": [seen, summed], "training_set": {**TRAINING_SET, "from": "web"}},
    }
    write_use_case(tmp_path, features=parts)
    for amount, told in (("amount::DECIMAL(9, 2)", "DECIMAL"), ("amount > 2", "BOOLEAN")):
        query(amount)
        with pytest.raises(ConfigurationError, match=f"amount of feature table seen is {told}"):
            load_definitions(tmp_path)
    query("amount::FLOAT")
    views = of_kind(load_definitions(tmp_path), FeatureView)
    fields = {name: [f"{f.name}: {f.dtype}" for f in v.features] for name, v in views.items()}
    assert fields == {
        "seen": ["order_id: Int64", "channel: String", "amount: Float32"],
        "summed": ["amount_sum_7d: Float32"],
    }
    spec = read_features(tmp_path)[1].training_set
    assert (spec.row_id, spec.categorical) == ("order_id", ("channel",))
    assert spec.numeric == ("amount",)


@dataclass(frozen=True)
class Run:
    """The use case after its feature tables were built and its training set retrieved."""

    repo: Path
    orders: pd.DataFrame
    settings: Settings
    config: PipelineConfig
    suites: Suites
    tables: FeatureTables
    snapshot: FeatureSnapshot

    @property
    def rows(self) -> pd.DataFrame:
        return pd.read_parquet(self.settings.store.path(self.snapshot.data))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("orders")
    repo = write_use_case(folder / "project")
    orders = write_rows(repo)
    settings, config = Settings(home=folder / "home", feature_repo=repo), read_pipeline_config(repo)
    store, features = settings.store, config.features
    landed = land_raw_rows(config.window, features, repo, store)
    suites = suites_of(config, repo)
    validate_tables(landed.tables, suites.rows, config.window, store, "Nothing")
    tables = build_feature_tables(vouched(landed), EMPTY, features, repo, store)
    validate_tables(tables.tables, suites.tables, config.window, store, "Nothing")
    snapshot = build_training_set(tables, config.window, features, settings)
    validate_snapshot(snapshot, suites.training_set, store, splits=config.splits)
    return Run(repo, orders, settings, config, suites, tables, snapshot)


def test_one_file_gives_rows_with_what_was_known_at_their_moment(run: Run) -> None:
    assert run.snapshot.columns.categorical == (
        *("channel", "gift", "habits__channel_last", "habits__gift_last", "customers__town"),
    )
    assert run.snapshot.columns.numeric == (
        *("amount", "habits__count_7d", "habits__count_4w", "habits__amount_mean_7d"),
        "customers__age",
    )
    waits = [(e.reason, e.num_rows > 0) for e in run.snapshot.excluded]
    assert waits == [("the label is not known yet", True)]
    times = pd.to_datetime(run.orders["ordered"])
    row = run.rows.iloc[-1]
    own = run.orders["customer"] == row["customer"]
    newest = times[own & (times <= row["event_timestamp"] - timedelta(minutes=15))].max()
    week = own & (times <= newest) & (times > newest - timedelta(days=7))
    assert row["habits__count_7d"] == week.sum()
    assert row["habits__amount_mean_7d"] == pytest.approx(run.orders["amount"][week].mean())
    assert row["customers__town"] in ("Nizwa", "Sur", "Ibri")
    assert set(run.rows["gift"]) == {"true", "false"}


def test_a_training_set_comes_with_the_digests_of_its_parts(run: Run) -> None:
    data, parts = run.snapshot.data, run.snapshot.parts
    assert parts is not None
    digests = json.loads(run.settings.store.path(parts).read_text())
    content = run.settings.store.path(data).read_bytes()
    for length, sha256 in digests:
        assert hashlib.sha256(content[:length]).hexdigest() == sha256
        content = content[length:]
    assert content == b""
    assert len(digests) == 1 + pq.read_metadata(run.settings.store.path(data)).num_row_groups


def test_a_snapshot_is_made_again_from_the_sql_that_its_declaration_was_compiled_to(
    run: Run,
) -> None:
    assert run.snapshot.pins is not None
    kept = run.settings.store.path(run.snapshot.pins.evidence) / "sql" / "training_set.sql"
    assert kept.read_text() == frame_query(run.repo, run.config.features)
    assert verify_snapshot(run.snapshot, run.settings).differences == ()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ({"event_timestamp": pd.Timestamp("2025-01-01", tz="UTC")}, "inside the window"),
        ({"returned": 2}, "a label is 0 or 1"),
        ({"order_id": "7"}, "named by its order_id"),
        ({"returned": pd.Series(dtype="float64")}, "event_timestamp, returned are always there"),
        ({"amount": "much"}, "amount is VARCHAR, expected numbers"),
        ({"profit": 1.0}, "profit are not among those the suite allows"),
    ],
)
def test_a_base_suite_refuses_what_no_training_set_can_be(
    run: Run, tmp_path: Path, spoil: dict[str, Any], told: str
) -> None:
    def build(folder: StagedFolder) -> FeatureSnapshot:
        run.rows.assign(**spoil).to_parquet(folder.path / "data.parquet")
        return run.snapshot.model_copy(update={"data": folder.artifact("data.parquet")})

    store = ArtifactStore(tmp_path)
    spoilt = store.build_once("snapshots", "spoilt", FeatureSnapshot, build)
    suite = base_suite("training_set", table_shapes(run.config.features, run.repo)["training_set"])
    with pytest.raises(DataContractError, match=told):
        validate_snapshot(spoilt, suite, store)
