"""Online reads by every back-end, against Feast's own: values, ages, policies, failures."""

import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource, types
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.type_map import python_values_to_proto_values
from feast.types import FeastType
from feast.value_type import ValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.features.config import OnlineConfig, ViewPolicy
from tasks.features.online import reader as online_reader
from tasks.features.online.backend import FeastBackend
from tasks.features.online.reader import OnlineReader
from tasks.kernel import errors
from tests.support.data.feature_views import online_store, repo_config
from tests.support.services.servers import RedisServer, redis_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

SERVE = OnlineConfig(policy=ViewPolicy(stale="serve"), timeout_s=5)
NOON = datetime(2013, 3, 1, 12, tzinfo=UTC)
EVERY: dict[str, tuple[FeastType, Any]] = {
    "float": (types.Float32, 1.1),
    "double": (types.Float64, 2.2),
    "int": (types.Int32, -3),
    "long": (types.Int64, 2**40),
    "text": (types.String, "naïve"),
    "raw": (types.Bytes, b"\x00\xff"),
    "flag": (types.Bool, True),
    "moment": (types.UnixTimestamp, datetime(2012, 5, 1, 3, 4, 5, tzinfo=UTC)),
    "uuid": (types.Uuid, uuid.UUID(int=7)),
    "json": (types.Json, '{"a": [1, null]}'),
    "mapping": (types.Map, {"a": "b"}),
    "floats": (types.Array(types.Float32), [1.5, 2.5]),
    "texts": (types.Array(types.String), ["x", ""]),
    "longs": (types.Set(types.Int64), {3, 4}),
}
TYPES = {name: kind for name, (kind, _) in EVERY.items()}
FULL = {name: value for name, (_, value) in EVERY.items()}


@dataclass
class Online:
    """The store, how its values are read, and a way to write to it."""

    feast: FeatureStore
    kind: str = ""

    def reader(self, config: OnlineConfig = SERVE, service: str = "all") -> OnlineReader:
        with pytest.MonkeyPatch.context() as patch:
            if self.kind == "feast":  # as for any store that has no reader of its own
                patch.setattr(online_reader, "open_backend", FeastBackend)
            return OnlineReader(self.feast, self.feast.get_feature_service(service), config)

    def by_feast(self, rows: list[dict[str, Any]], service: str) -> dict[str, list[Any]]:
        wanted = self.feast.get_feature_service(service)
        answer = self.feast.get_online_features(wanted, rows, full_feature_names=True)
        return dict(answer.to_dict())

    def write(
        self,
        view: str,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        event_time: datetime = NOON,
    ) -> None:
        """Write one entity of a view through Feast's own online write."""
        definition = self.feast.get_feature_view(view)
        columns = (*definition.entity_columns, *definition.features)
        kinds = {column.name: column.dtype.to_value_type() for column in columns}

        def packed(row: Mapping[str, Any]) -> dict[str, Any]:
            return {n: python_values_to_proto_values([v], kinds[n])[0] for n, v in row.items()}

        entity = EntityKey(join_keys=list(key), entity_values=list(packed(key).values()))
        row = (entity, packed(values), event_time, None)
        provider = self.feast._get_provider()
        provider.online_write_batch(self.feast.config, definition, [row], None)

    def close(self) -> None:
        """Close Feast's connection to a SQLite store, so that its file can be exchanged."""
        store = self.feast._get_provider().online_store
        store._conn.close()
        store._conn = None


def typed_store(folder: Path, online_store: dict[str, Any]) -> Online:
    """A new store in `folder`, with the definitions and some entities."""
    (folder / "tables").mkdir(parents=True)
    store = Online(FeatureStore(config=repo_config(folder, online_store, repo_path=folder)))
    store.feast.apply(_definitions())
    fill(store)
    return store


def _view(name: str, entities: list[Entity], ttl: timedelta, **types: FeastType) -> FeatureView:
    return FeatureView(
        name=name,
        entities=entities,
        ttl=ttl,
        schema=[Field(name=feature, dtype=kind) for feature, kind in types.items()],
        source=FileSource(name=f"{name}_table", path=name, timestamp_field="event_timestamp"),
    )


def _definitions() -> list[Any]:
    user = Entity(name="user", join_keys=["user_id"], value_type=ValueType.INT64)
    place = Entity(name="place", join_keys=["place"], value_type=ValueType.STRING)
    small = Entity(name="small", join_keys=["small"], value_type=ValueType.INT32)
    hours, day = timedelta(hours=1), timedelta(days=1)
    every = _view("every", [place], 6 * hours, **TYPES)
    same_key = _view("same_key", [place], timedelta(0), text=types.String, wide=types.Float64)
    pair = _view("pair", [user, place], day, score=types.Float32, count=types.Int64)
    single = _view("single", [small], hours, level=types.Float32)
    world = _view("world", [], day, mood=types.Float32)
    here = same_key.with_name("here")
    elsewhere = same_key.with_name("elsewhere").with_join_key_map({"place": "destination"})
    features = [every[["float", "text"]], here, elsewhere, pair, single, world]
    services = [
        FeatureService(name="all", features=features),
        FeatureService(name="whole", features=[every]),
        FeatureService(name="abroad", features=[elsewhere]),
    ]
    return [user, place, small, every, same_key, pair, single, world, *services]


@pytest.fixture(scope="module", params=["redis", "sqlite", "feast"])
def online(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Online]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # Several trips for most requests.
        patch.setattr("tasks.features.online.redis_reader.KEYS_PER_TRIP", 3)
        if request.param == "redis":
            store = on_redis(folder, stack.enter_context(redis_server(folder)))
        else:
            store = on_sqlite(folder)
        store.kind = request.param
        yield store


def on_sqlite(folder: Path, name: str = "store", file: str = "online.db") -> Online:
    return typed_store(folder / name, online_store("sqlite", str(folder / file)))


def on_redis(folder: Path, server: RedisServer) -> Online:
    described = {"type": "redis", "connection_string": server.connection_string}
    return typed_store(folder / "store", described)


def fill(store: Online) -> None:
    """Entities with all values, with nulls, with single features, and none."""
    nothing: dict[str, Any] = dict.fromkeys(FULL)
    store.write("every", {"place": "full"}, FULL)
    store.write("every", {"place": "null"}, nothing, NOON - timedelta(hours=1))
    store.write("every", {"place": "zero"}, {**nothing, "float": 0.0, "text": "", "flag": False})
    store.write("every", {"place": "part"}, {"float": -0.0}, NOON - timedelta(hours=6))
    store.write("every", {"place": ""}, {"text": "empty key"}, NOON - timedelta(hours=7))
    store.write("same_key", {"place": "full"}, {"text": "x" * 300, "wide": 1e300})
    store.write("same_key", {"place": "null"}, {"text": None, "wide": None})
    store.write("pair", {"user_id": 1, "place": "full"}, {"score": 0.5, "count": 2**60})
    store.write("pair", {"user_id": -1, "place": "zero"}, {"score": None, "count": None})
    store.write("single", {"small": -7}, {"level": 3.25})
    store.write("world", {"__dummy_id": ""}, {"mood": 0.75})


PLACES = ["full", "null", "zero", "part", "", "unknown"]
ROW = st.fixed_dictionaries(
    {
        "user_id": st.sampled_from([1, -1, 2, 2**62]),
        "place": st.sampled_from(PLACES),
        "destination": st.sampled_from(PLACES),
        "small": st.sampled_from([-7, 0, 2**31 - 1]),
    }
)


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@settings(suppress_health_check=list(HealthCheck))
@given(rows=st.lists(ROW, min_size=1, max_size=12))
def test_values_are_those_that_feast_gives(online: Online, rows: list[dict[str, Any]]) -> None:
    answer = online.reader().read(columns_of(rows), NOON)
    theirs = online.by_feast(rows, "all")
    # Asked with both columns, Feast takes for a renamed key whichever of them comes last.
    abroad = online.by_feast([{"destination": row["destination"]} for row in rows], "abroad")
    ours = answer.rows()
    for name, values in {**theirs, **abroad}.items():
        if name not in rows[0]:
            assert [row[name] for row in ours] == values, name
    assert set(answer.columns) == set(theirs) - set(rows[0])


def test_every_value_type_is_given_as_feast_gives_it(online: Online) -> None:
    ours = online.reader(service="whole").read({"place": PLACES}, NOON).rows()
    theirs = online.by_feast([{"place": place} for place in PLACES], "whole")
    for name in FULL:
        assert [row[f"every__{name}"] for row in ours] == theirs[f"every__{name}"], name
    assert ours[0]["every__json"] == {"a": [1, None]}
    assert ours[0]["every__longs"] == {3, 4}


def test_a_null_key_is_missing_and_disturbs_no_other_row(online: Online) -> None:
    columns = {
        "user_id": [1, None, float("nan"), 1],
        "place": ["full", "full", None, "full"],
        "destination": [None] * 4,
        "small": [-7, None, -7, -7],
    }
    answer = online.reader().read(columns, NOON)
    assert answer.views["pair"].labels == ["fresh", "missing", "missing", "fresh"]
    assert answer.views["elsewhere"].labels == ["missing"] * 4
    assert answer.views["every"].labels == ["fresh", "fresh", "missing", "fresh"]
    assert answer.rows()[0] == answer.rows()[3]
    assert answer.columns["pair__count"] == [2**60, None, None, 2**60]
    assert np.isnan(answer.views["pair"].age_s[1])
    assert np.isnat(answer.views["pair"].event_time[1])


def ask(place: str) -> dict[str, list[Any]]:
    return {"place": [place], "user_id": [1], "destination": ["full"], "small": [-7]}


def test_the_ttl_is_enforced_and_its_edge_is_inside(online: Online) -> None:
    reader = online.reader(OnlineConfig(timeout_s=5))
    at_edge = reader.read(ask("full"), NOON + timedelta(hours=6))
    beyond = reader.read(ask("full"), NOON + timedelta(hours=6, microseconds=1))
    assert at_edge.views["every"].labels == ["fresh"]
    assert at_edge.views["every"].age_s.tolist() == [6 * 3600]
    assert at_edge.rows()[0]["every__text"] == "naïve"
    assert beyond.views["every"].labels == ["stale"]
    assert beyond.rows()[0]["every__text"] is None
    assert beyond.rows()[0]["every__float"] is None
    assert beyond.rows()[0]["here__wide"] == 1e300, "a view without a TTL never expires"
    assert beyond.views["here"].event_time[0] == np.datetime64("2013-03-01T12:00:00")


def test_each_row_may_be_asked_at_its_own_moment(online: Online) -> None:
    columns = {name: values * 3 for name, values in ask("full").items()}
    moments = [NOON, NOON + timedelta(hours=7), NOON - timedelta(hours=1)]
    answer = online.reader(OnlineConfig(timeout_s=5)).read(columns, moments)
    assert answer.views["every"].labels == ["fresh", "stale", "ahead"]
    assert answer.columns["every__text"] == ["naïve", None, None]
    assert answer.views["every"].age_s.tolist() == [0, 7 * 3600, -3600]


def test_policies_serve_or_refuse_what_is_stale_or_missing(online: Online) -> None:
    late = NOON + timedelta(hours=7)
    serving = OnlineConfig(view_policies={"every": ViewPolicy(stale="serve")}, timeout_s=5)
    answer = online.reader(serving).read(ask("full"), late)
    assert answer.views["every"].labels == ["stale"]
    assert answer.columns["every__text"] == ["naïve"]
    refusing = online.reader(
        OnlineConfig(view_policies={"every": ViewPolicy(stale="refuse")}, timeout_s=5)
    )
    with pytest.raises(
        errors.StaleFeaturesError, match=r"1 of 1 rows .* feature view every, .* row 0"
    ):
        refusing.read(ask("full"), late)
    assert refusing.read(ask("full"), NOON).num_rows == 1
    strict = online.reader(OnlineConfig(policy=ViewPolicy(missing="refuse"), timeout_s=5))
    with pytest.raises(errors.StaleFeaturesError, match="have no values of feature view every"):
        strict.read(ask("unknown"), NOON)


def test_the_keys_of_a_view_can_be_listed(online: Online) -> None:
    reader = online.reader()
    names = [view.name for view in reader.plan.views]
    pairs = reader.stored_keys(names.index("pair"), 10)
    places = reader.stored_keys(names.index("elsewhere"), 10)
    if online.kind == "feast":  # its interface cannot
        assert pairs == places == []
        return
    known = [{"user_id": 1, "place": "full"}, {"user_id": -1, "place": "zero"}]
    assert all(pair in pairs for pair in known)
    assert sorted(place["destination"] for place in places) == ["full", "null"]
    assert len(reader.stored_keys(names.index("every"), 2)) == 2


def test_rows_are_counted_by_view_and_state(online: Online) -> None:
    reader = online.reader(OnlineConfig(timeout_s=5))
    for place, late in (("full", 0), ("null", 0), ("unknown", 7), ("full", 7)):
        reader.read(ask(place), NOON + timedelta(hours=late))
    assert reader.num_rows_by_state()["every"] == {"fresh": 2, "stale": 1, "missing": 1, "ahead": 0}


@pytest.mark.parametrize(
    ("request_", "now", "sentence"),
    [
        ({"place": ["full"]}, NOON, "no key column destination, user_id, small"),
        ({**ask("full"), "place": ["full", "null"]}, NOON, "differ in length"),
        ({**ask("full"), "place": "full"}, NOON, "place of the request is one str, expected a li"),
        ({**ask("full"), "user_id": [1.5]}, NOON, "entity key 1.5 is a float"),
        ({**ask("full"), "small": [2**31]}, NOON, "whole number of 4 bytes"),
        (ask("full"), datetime(2013, 3, 1), "no time zone"),
        (ask("full"), [NOON, NOON], "2 moments were given for 1 rows"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(
    online: Online, request_: Any, now: Any, sentence: str
) -> None:
    with pytest.raises(errors.DataContractError, match=sentence):
        online.reader().read(request_, now)


def test_a_policy_for_a_view_that_is_not_read_is_refused(online: Online) -> None:
    wrong = OnlineConfig(view_policies={"everi": ViewPolicy()})
    with pytest.raises(
        errors.ConfigurationError, match=r"names everi, which .* it reads every, here"
    ):
        online.reader(wrong)


def test_readers_in_many_threads_never_see_a_half_written_entity(online: Online) -> None:
    """A writer moves all features of one entity together; readers must find them equal."""
    stop, torn = threading.Event(), []
    reader = online.reader()
    key = {"user_id": 99, "place": "busy"}
    online.write("pair", key, {"score": 0.0, "count": 0}, NOON)

    def read() -> None:
        asked = {"place": ["busy"], "user_id": [99], "destination": ["x"], "small": [0]}
        while not stop.is_set():
            answer = reader.read(asked, NOON)
            count, score = answer.columns["pair__count"][0], answer.columns["pair__score"][0]
            second = (answer.event_us[answer.view_names.index("pair"), 0] // 10**6) % 10**6
            base = int(NOON.timestamp()) % 10**6
            if not count == int(score) == second - base:
                torn.append((count, score, second - base))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 120):
        online.write(
            "pair", key, {"score": float(number), "count": number}, NOON + timedelta(seconds=number)
        )
    stop.set()
    for thread in threads:
        thread.join()
    assert torn == []


def test_a_store_that_went_away_is_a_transient_error_and_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.features.online.backend.FIRST_PAUSE_S", 60)
    monkeypatch.setattr("tasks.features.online.backend.LONGEST_PAUSE_S", 60)
    with redis_server(tmp_path) as server:
        reader = on_redis(tmp_path, server).reader(OnlineConfig(timeout_s=1))
        assert reader.read(ask("full"), NOON).num_rows == 1
    with pytest.raises(errors.TransientError, match=r"Redis at 127\.0\.0\.1:\d+ could not be read"):
        reader.read(ask("full"), NOON)
    with pytest.raises(errors.TransientError, match="It is not asked for another"):
        reader.read(ask("full"), NOON)


def test_a_server_that_was_started_again_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.features.online.backend.FIRST_PAUSE_S", 0.001)
    with redis_server(tmp_path) as server:
        reader = on_redis(tmp_path, server).reader()
        reader.read(ask("full"), NOON)
        server.connect().client_kill_filter(skipme=False, _type="normal")
        assert reader.read(ask("full"), NOON).columns["every__text"] == ["naïve"]


def test_something_else_in_redis_is_named(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        reader = on_redis(tmp_path, server).reader()
        client = server.connect()
        for key in list(client.scan_iter(_type="hash")):
            client.delete(key)
            client.set(key, "not a hash")
        for _ in range(2):  # the connection of the first is not used again
            with pytest.raises(
                errors.FeatureStoreError, match=r"Redis refuses to read .*WRONGTYPE"
            ):
                reader.read(ask("full"), NOON)


def test_a_sqlite_store_that_was_replaced_is_followed(tmp_path: Path) -> None:
    store = on_sqlite(tmp_path)
    reader = store.reader()
    assert reader.read(ask("full"), NOON).columns["every__text"] == ["naïve"]
    other = on_sqlite(tmp_path, "other", "new.db")
    other.write("every", {"place": "full"}, {"text": "new"})
    other.close()
    store.close()
    for left in tmp_path.glob("online.db-*"):
        left.unlink()
    (tmp_path / "new.db").replace(tmp_path / "online.db")
    assert reader.read(ask("full"), NOON).columns["every__text"] == ["new"]


def test_a_locked_sqlite_store_is_a_transient_error(tmp_path: Path) -> None:
    store = on_sqlite(tmp_path)
    store.close()
    reader = store.reader(OnlineConfig(timeout_s=0.05))
    with sqlite3.connect(tmp_path / "online.db", isolation_level=None) as writer:
        writer.execute("PRAGMA journal_mode = DELETE")  # as Feast's own store writes
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(errors.TransientError, match=r"online\.db could not be read: .*locked"):
            reader.read(ask("full"), NOON)
        writer.execute("ROLLBACK")
    writer.close()


def test_a_sqlite_store_without_the_view_or_no_store_at_all_is_named(tmp_path: Path) -> None:
    file = tmp_path / "online.db"
    store = on_sqlite(tmp_path)
    with sqlite3.connect(file) as connection:
        connection.execute('DROP TABLE "tests_single"')
    connection.close()
    reader = store.reader()
    with pytest.raises(errors.FeatureStoreError, match="no table for a view of all"):
        reader.read(ask("full"), NOON)
    reader.close()
    store.close()
    file.unlink()
    with pytest.raises(
        errors.FeatureStoreError, match=r"online\.db does not exist; run the feature"
    ):
        reader.read(ask("full"), NOON)
    file.write_bytes(b"this is no database, not by a long way" * 100)
    with pytest.raises(errors.FeatureStoreError, match=r"online\.db is damaged or no SQLite file"):
        store.reader().read(ask("full"), NOON)
