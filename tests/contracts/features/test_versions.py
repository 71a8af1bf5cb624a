"""Versions of views and services in a real registry, and snapshots made again from their pins."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tasks.contracts.data import FeatureSnapshot, SnapshotPins
from tasks.features.access import versions
from tasks.features.access.store import GuardedFeatureStore, apply_definitions, open_store
from tasks.features.checks.report import SnapshotVerification
from tasks.features.checks.verification import find_snapshot, verify_snapshot
from tasks.features.online.materialization import write_earlier_versions
from tasks.features.snapshot import service_to_train_on
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import digest_of
from tests.support.data.installation import Installation, Refreshed
from tests.support.data.profiles import write_profiles
from tests.support.data.repository import SmallRepository, days
from tests.support.services.servers import postgres_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

SERVICE = "flight_delay_v1"
ENTITIES = [{"origin": "JFK", "tailnum": "N14228"}]
LEFT_OUT = ("carrier_stats", "origin_stats", "destination_stats", "route_stats", "plane_history")


class Bench:
    """One registry on the shared tables, and definitions to change."""

    def __init__(self, made: Refreshed, home: Path, folder: Path) -> None:
        shared, self.tables = made
        self.repository = SmallRepository(folder, num_days=1)
        self.installation = Installation(home, self.repository)
        self._leave_two_views()
        home.mkdir(parents=True, exist_ok=True)
        for name in ("artifacts", "signatures", "keyring"):
            (shared.home / name).mkdir(exist_ok=True)
            (home / name).symlink_to(shared.home / name)

    def _leave_two_views(self) -> None:
        """What is tested here is the same for seven views, and takes longer."""
        file = self.repo / "definitions.py"
        text = file.read_text()
        for name in LEFT_OUT:
            text = text.replace(f"        {name},\n", "")
        file.write_text(f"{text}\ndel {', '.join(LEFT_OUT)}\n")

    @property
    def repo(self) -> Path:
        return self.repository.path

    def open(self) -> GuardedFeatureStore:
        return self.installation.open(self.tables)

    def apply(self) -> GuardedFeatureStore:
        return self.installation.apply(self.tables)

    def change(self, pattern: str, replacement: str) -> None:
        """Rewrite the definition of the view `weather`, or what follows it."""
        file = self.repo / "definitions.py"
        head, weather = file.read_text().split("weather = FeatureView(")
        changed, count = re.subn(pattern, replacement, weather, count=1)
        assert count, pattern
        file.write_text(f"{head}weather = FeatureView({changed}")

    def materialize(self, num_days: int = 3, **settings: Any) -> None:
        self.installation.materialize(self.tables, days(0, num_days), **settings)

    def snapshot(self) -> tuple[FeatureSnapshot, SnapshotPins]:
        made = self.installation.snapshot(self.tables, days(1, 2))
        return made, made.pins

    def verify(self, snapshot: FeatureSnapshot, **changes: object) -> SnapshotVerification:
        """Make the snapshot again, with some of its fields changed."""
        return verify_snapshot(snapshot.model_copy(update=changes), self.installation.settings)

    def online(self, service: str) -> dict[str, Any]:
        feast = self.open()
        answer = feast.get_online_features(
            features=feast.get_feature_service(service),
            entity_rows=ENTITIES,
            full_feature_names=True,
        )
        return {re.sub(r"@v\d+", "", k): v[0] for k, v in answer.to_dict().items()}

    def weather(self, reference: str) -> dict[str, Any]:
        """One historical row of features of `weather`."""
        moment = pd.Timestamp("2013-01-02T12:45:00Z")
        frame = pd.DataFrame({"origin": ["JFK"], "event_timestamp": [moment]})
        job = self.open().get_historical_features(entity_df=frame, features=[reference])
        row: dict[str, Any] = job.to_df().to_dict("records")[0]
        return row


@pytest.fixture
def bench(three_days: Refreshed, tmp_path: Path) -> Bench:
    return Bench(three_days, tmp_path / "home", tmp_path)


def test_applying_again_unchanged_makes_no_version(bench: Bench) -> None:
    feast = bench.apply()
    apply_definitions(feast, again=True)
    feast = bench.open()
    assert {
        view.name: versions.view_versions(feast, view.name) for view in feast.list_feature_views()
    } == {view.name: [0] for view in feast.list_feature_views()}
    assert [v.number for v in versions.service_versions(feast, SERVICE)] == [1]


def test_an_old_version_stays_readable_beside_the_new_one_online_and_offline(bench: Bench) -> None:
    bench.materialize()
    before = bench.online(SERVICE)
    bench.change(r'        "visib",\n', "")
    assert versions.view_versions(bench.apply(), "weather") == [0, 1]
    applied = bench.online(SERVICE)
    assert applied == before, "readers go on with the old version until the new one has values"
    bench.materialize()
    old, new = bench.online(versions.versioned_name(SERVICE, 1)), bench.online(SERVICE)
    assert old == before
    assert "weather__visib" not in new
    assert new == {k: v for k, v in old.items() if k != "weather__visib"}
    assert bench.weather("weather@v0:visib")["visib"] == pytest.approx(10)
    with pytest.raises(Exception, match="visib"):
        bench.weather("weather@v1:visib")


@pytest.mark.parametrize("kept", [0, 1])
def test_an_earlier_version_goes_on_being_written_where_it_is_asked_for(
    bench: Bench, kept: int
) -> None:
    bench.materialize(2, earlier_versions=kept)
    before = bench.online(SERVICE)
    bench.change(r'        "visib",\n', "")
    bench.materialize(3, earlier_versions=kept)
    feast = bench.open()
    old, new = bench.online(versions.versioned_name(SERVICE, 1)), bench.online(SERVICE)
    assert new["weather__temp"] != before["weather__temp"]
    assert old["weather__temp"] == (new if kept else before)["weather__temp"]
    assert old["weather__visib"] is not None
    assert versions.view_versions(feast, "weather") == [0, 1]
    assert feast.get_feature_view("weather").current_version_number == 1


def test_an_earlier_version_whose_table_lost_a_column_is_left_out_with_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.change(r'        "visib",', '        "visib",\n        "fog",')
    installation, repo = bench.installation, bench.installation.repository.path
    elsewhere = open_store(installation.home, repo, installation.home / "no_tables")
    apply_definitions(elsewhere)  # as if the query gave fog once
    bench.change(r'        "fog",\n', "")
    feast = bench.apply()
    moment = datetime(2013, 1, 2, tzinfo=UTC)
    caplog.set_level("INFO")
    write_earlier_versions(feast, moment, moment + timedelta(hours=1), 1)
    assert "for an earlier version of a service" not in caplog.text  # nothing was written
    assert "weather@v0 is not written any further" in caplog.text
    assert "no column fog any more" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"ttl=timedelta\(hours=\d+\)", "ttl=timedelta(minutes=30)"),
        (r"source=weather_table", "source=FileSource(name='weather_created', path='weather', "
         "timestamp_field='created')"),
    ],
)  # fmt: skip
def test_what_feast_would_not_number_makes_a_version_too(
    bench: Bench, pattern: str, replacement: str
) -> None:
    """Feast's own rule looks at fields and entities alone; a TTL decides values as well."""
    bench.apply()
    bench.change(pattern, replacement)
    feast = bench.apply()
    assert versions.view_versions(feast, "weather") == [0, 1]
    newest = versions.newest_version(feast, SERVICE)
    assert (newest.number, newest.views["weather"]) == (2, 1)


def test_a_service_whose_content_changed_under_the_same_name_is_noticed(bench: Bench) -> None:
    bench.materialize()
    before, old = bench.snapshot()
    bench.change(r"        weather,\n    \],", "    ],")  # the service no longer reads the view
    after, new = bench.snapshot()
    assert before.feature_service == after.feature_service == SERVICE
    assert (old.service_version, new.service_version) == (1, 2)
    assert old.service_definition != new.service_definition
    assert "weather" in old.views
    assert "weather" not in new.views
    published = bench.open().get_feature_service(SERVICE).tags[versions.VERSION_TAG]
    assert published == "1", "training on a version does not move what readers get"


def test_a_view_that_is_no_longer_defined_stays_while_a_version_reads_it(bench: Bench) -> None:
    bench.apply()
    bench.change(r"        weather,\n    \],", "    ],")
    definitions = bench.repo / "definitions.py"
    text = definitions.read_text()
    start = text.index("weather = FeatureView(")
    definitions.write_text(text[:start] + text[text.index("# Feature services") :])
    assert bench.apply().get_feature_view("weather").name == "weather"
    assert bench.weather("weather@v0:temp")["temp"] == pytest.approx(23)


def test_a_name_that_looks_like_a_version_is_refused(bench: Bench) -> None:
    feast = bench.apply()
    service = feast.get_feature_service(SERVICE)
    service.name = "late.v3"
    with pytest.raises(ConfigurationError, match="ends like a version"):
        versions.apply_service_versions(feast, [service])
    with pytest.raises(ConfigurationError, match=SERVICE):
        service_to_train_on(feast, "another")


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as uri:
        yield uri


def test_versions_are_kept_in_a_registry_on_postgresql(bench: Bench, postgres: str) -> None:
    settings = write_profiles(bench.repo)
    address = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", postgres)
    changed = re.sub(r"path: sqlite:.*", f"path: {json.dumps(address)}", settings.read_text())
    settings.write_text(changed.replace("cache_ttl", "cache_mode: thread\n  cache_ttl"))
    bench.materialize()
    bench.change(r'        "visib",\n', "")
    bench.materialize()
    feast = bench.open()
    assert versions.view_versions(feast, "weather") == [0, 1]
    assert [v.number for v in versions.service_versions(feast, SERVICE)] == [1, 2]
    assert bench.online(versions.versioned_name(SERVICE, 1))["weather__visib"] == pytest.approx(10)


def test_a_snapshot_pins_all_that_it_was_made_from(bench: Bench) -> None:
    snapshot, pins = bench.snapshot()
    evidence = bench.installation.store.path(pins.evidence)
    assert {v: p.definition for v, p in pins.views.items()} == snapshot.feature_views
    assert {(t.group, t.name): t.sha256 for t in pins.tables} == {
        (group, ref.name): ref.artifact.sha256
        for group, refs in (("raw", bench.tables.raw), ("features", bench.tables.tables))
        for ref in refs
    }
    weather = pins.views["weather"]
    table = bench.installation.store.path(
        next(t.artifact for t in bench.tables.tables if t.name == "weather")
    )
    rows = pd.concat(pd.read_parquet(file) for file in table.glob("*.parquet"))
    assert weather.last_event == rows["event_timestamp"].max().to_pydatetime()
    assert weather.last_created == rows["created"].max().to_pydatetime()
    query = (evidence / "sql" / "entities.sql").read_text()
    assert query == (bench.repo / "sql" / "entities.sql").read_text()
    everything = "".join(f.read_text() for f in evidence.rglob("*.*"))
    assert "weather__temp" in (evidence / "retrieval.sql").read_text()
    assert str(bench.installation.home) not in everything
    assert str(bench.repo) not in everything


def test_a_snapshot_comes_out_the_same_though_everything_has_moved_on(bench: Bench) -> None:
    bench.apply()
    snapshot, _ = bench.snapshot()
    store = bench.installation.store
    bench.change(r'        "visib",\n', "")
    bench.apply()
    entities = bench.repo / "sql" / "entities.sql"
    entities.write_text(entities.read_text().replace("INTERVAL 2 HOURS", "INTERVAL 3 HOURS"))
    outcome = bench.verify(find_snapshot(snapshot.data.sha256[:10], store))
    assert outcome.same
    assert outcome.differences == ()
    assert not list(store.root.glob(".verify-*"))


def test_a_rebuild_that_differs_says_in_how_many_rows(bench: Bench) -> None:
    snapshot, _ = bench.snapshot()
    stored = bench.installation.store.path(snapshot.data)
    whole = stored.read_bytes()
    rows = pd.read_parquet(stored)
    rows.loc[:4, "weather__temp"] = -99
    rows.to_parquet(stored, index=False)
    forged = snapshot.data.model_copy(update={"sha256": digest_of(stored)})
    try:
        outcome = bench.verify(snapshot, data=forged)
    finally:
        stored.write_bytes(whole)
    assert not outcome.same
    assert "5 stored rows are not in the rebuilt file" in outcome.differences[0]


def test_tables_with_the_same_rows_stand_in_for_those_that_are_gone(bench: Bench) -> None:
    snapshot, pins = bench.snapshot()
    gone = pins.tables[0].model_copy(update={"sha256": "0" * 64})
    changed = pins.model_copy(update={"tables": (gone, *pins.tables[1:])})
    outcome = bench.verify(snapshot, pins=changed)
    assert outcome.same
    assert "others with the same rows took their place" in outcome.remarks[0]


def test_what_is_lost_is_named_where_a_snapshot_cannot_be_made_again(bench: Bench) -> None:
    snapshot, pins = bench.snapshot()
    outcome = bench.verify(snapshot, tables_version="feedbeef" * 4)
    assert outcome.rebuilt_sha256 is None
    assert not outcome.same
    assert outcome.differences == ("no tables of version feedbeeffeed are kept any more",)
    evidence = pins.evidence.model_copy(update={"uri": "artifact:snapshots/gone"})
    bare = bench.verify(snapshot, pins=pins.model_copy(update={"evidence": evidence}))
    assert "artifact:snapshots/gone cannot be read as it was" in bare.differences[0]
    assert "pins nothing" in bench.verify(snapshot, pins=None).differences[0]
    with pytest.raises(ArtifactError, match="names 0 snapshots"):
        find_snapshot("feedbeef", bench.installation.store)
