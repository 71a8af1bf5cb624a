"""A corrected table reaches the online store whatever was there; SQLite and Redis by one rule."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, PushSource, ValueType
from feast.types import FeastType, Float64, String
from google.protobuf.timestamp_pb2 import Timestamp

from tasks.features.online.materialization import spelled_key
from tasks.features.online.newer_wins import Removal
from tasks.features.online.sqlite_store import NewerWinsSqliteOnlineStore
from tasks.kernel.errors import WindowError
from tests.support.data.feature_views import online_store, repo_config
from tests.support.services.servers import RedisServer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
ENTITY = Entity(name="k", join_keys=["k"], value_type=ValueType.INT64)


class Shop:
    """A project by Feast's own interfaces: one table of one key, and the views over it."""

    def __init__(self, folder: Path, online: dict[str, Any]) -> None:
        self.file = folder / "rows.parquet"
        config = repo_config(
            folder,
            online,
            batch_engine={"type": "tasks.features.online.vector_engine.VectorComputeEngine"},
            materialization={"pull_latest_features": True, "online_write_batch_size": 100},
        )
        config.registry.enable_online_feature_view_versioning = True
        self.store = FeatureStore(config=config)
        self.source = FileSource(
            name="rows",
            path=str(self.file),
            timestamp_field="at",
            created_timestamp_column="created",
        )
        self.define(v=Float64)

    def define(self, **types: FeastType) -> FeatureView:
        view = FeatureView(
            name="fv",
            entities=[ENTITY],
            ttl=timedelta(days=9),
            schema=[Field(name=name, dtype=kind) for name, kind in types.items()],
            source=PushSource(name="pushes", batch_source=self.source),
        )
        self.store.apply([ENTITY, view])
        return view

    def write(self, *rows: dict[str, Any]) -> None:
        frame = pd.DataFrame(rows)
        for name in ("at", "created"):
            frame[name] = frame[name].astype("datetime64[us, UTC]")
        frame.to_parquet(self.file)

    def refresh(self, *rows: dict[str, Any]) -> Any:
        """Let the table hold these rows alone, and materialize its newest six hours."""
        self.write(*rows)
        return self.materialize()

    def materialize(self, hours: float = 6) -> Any:
        self.store.materialize(NOW - hours * HOUR, NOW)
        return self.store._get_provider().batch_engine.writes["fv"]

    def push(self, **row: Any) -> None:
        self.store.push("pushes", pd.DataFrame([{"k": 1, **row}]))

    def read(self, key: int = 1, name: str = "v") -> Any:
        return self.store.get_online_features([f"fv:{name}"], [{"k": key}]).to_dict()[name][0]


@pytest.fixture(params=["sqlite", "redis"])
def shop(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> Iterator[Shop]:
    if request.param == "sqlite":
        made = Shop(tmp_path, online_store("sqlite", str(tmp_path / "online.db")))
        yield made
        made.store._get_provider().online_store._get_conn(made.store.config).close()
        return
    with server.connect() as client:
        client.flushall()
    made = Shop(tmp_path, online_store("redis", server.connection_string))
    yield made
    made.store._get_provider().online_store._get_client(made.store.config.online_store).close()


def row(hours: float, value: Any, created: float | None = None, key: int = 1) -> dict[str, Any]:
    """A row of so many hours ago."""
    made = hours if created is None else created
    return {"k": key, "at": NOW - hours * HOUR, "created": NOW - made * HOUR, "v": value}


@pytest.mark.parametrize("corrected", [(4, 4), (3, 2), (3, 4)])
def test_a_row_corrected_to_an_earlier_moment_or_at_its_own_reaches_readers(
    shop: Shop, corrected: tuple[float, float]
) -> None:
    hours, created = corrected
    shop.refresh(row(3, 666.0, created=3))
    shop.refresh(row(hours, 1.0, created))
    assert shop.read() == 1.0


def test_a_row_that_is_gone_is_taken_back_and_the_one_before_the_window_returns(shop: Shop) -> None:
    old, other = row(30, 5.0), row(1, 7.0, key=2)
    shop.refresh(old, row(1, 666.0), row(1, 667.0, key=3), other)
    write = shop.refresh(old, other)
    assert (shop.read(1), shop.read(2), shop.read(3)) == (5.0, 7.0, None)
    assert write.num_taken_back == 2


def test_the_keys_of_all_entities_are_told_and_one_of_them_is_removed(shop: Shop) -> None:
    shop.refresh(row(1, 7.0), row(1, 8.0, key=2))
    online, config = shop.store._get_provider().online_store, shop.store.config
    view = shop.store.get_feature_view("fv")
    keys = {spelled_key(key)["k"]: key for key in online.entity_keys(config, view)}
    assert {*keys} == {"1", "2"}
    assert online.remove_values(config, view, Removal(keys=[keys["1"]])) == 1
    assert (shop.read(1), shop.read(2)) == (None, 8.0)


def test_a_table_without_a_row_in_the_window_takes_nothing_back(shop: Shop) -> None:
    shop.refresh(row(1, 7.0))
    shop.refresh(row(30, 5.0))
    assert shop.read() == 7.0


def test_values_newer_than_the_window_and_older_than_it_stay(shop: Shop) -> None:
    shop.write(row(1, 7.0), row(30, 5.0, key=2), row(10, 3.0, key=3))
    shop.materialize(hours=40)
    shop.store.materialize(NOW - 20 * HOUR, NOW - 5 * HOUR)
    assert (shop.read(1), shop.read(2), shop.read(3)) == (7.0, 5.0, 3.0)


def test_what_was_pushed_stays_until_something_newer_comes(shop: Shop) -> None:
    shop.refresh(row(3, 1.0))
    shop.push(**row(2, 42.0))
    shop.refresh(row(3, 2.0, created=1))
    assert shop.read() == 42.0
    shop.refresh(row(1, 3.0))
    assert shop.read() == 3.0


def test_values_of_an_earlier_version_stay_like_pushed_ones_until_they_are_removed(
    shop: Shop, tmp_path: Path
) -> None:
    """Nothing is known of what wrote them."""
    shop.refresh(row(1, 666.0))
    config, store = shop.store.config, shop.store._get_provider().online_store
    if isinstance(store, NewerWinsSqliteOnlineStore):
        with closing(sqlite3.connect(tmp_path / "online.db")) as connection:
            connection.execute("ALTER TABLE tests_fv DROP COLUMN origin_us")
    else:
        (key,) = store._get_client(config.online_store).keys("*tests")
        stored = store._get_client(config.online_store).hget(key, "_ts:fv")
        plain = Timestamp(seconds=Timestamp.FromString(stored).seconds).SerializeToString()
        store._get_client(config.online_store).hset(key, "_ts:fv", plain)
    shop.refresh(row(2, 1.0))
    assert shop.read() == 666.0
    view = shop.store.get_feature_view("fv")
    assert store.remove_values(config, view, Removal("unknown")) == 1
    shop.materialize()
    assert shop.read() == 1.0
    assert store.remove_values(config, view, Removal("unknown")) == 0
    assert store.remove_values(config, view, Removal("not of the table")) == 0
    shop.push(**row(0, 2.0))
    assert store.remove_values(config, view, Removal("not of the table")) == 1


def test_a_type_that_changed_without_a_version_reaches_readers(shop: Shop) -> None:
    shop.refresh(row(1, 666.0))
    shop.define(v=String)
    shop.refresh(row(2, "text"))
    assert shop.read() == "text"


def test_a_view_that_is_deleted_and_made_again_remembers_nothing(shop: Shop) -> None:
    shop.refresh(row(1, 666.0))
    shop.store.apply([], objects_to_delete=[shop.define(v=Float64, w=Float64)], partial=False)
    shop.define(v=Float64)
    assert shop.read() is None
    shop.refresh(row(2, 42.0))
    assert shop.read() == 42.0


@pytest.mark.parametrize(("name", "hours"), [("at", 1), ("created", 48)])
def test_a_time_in_the_future_is_refused_in_every_way_in(
    shop: Shop, name: str, hours: float
) -> None:
    """Without the audited provider too: only the stores are in every way."""
    late = {**row(1, 666.0), name: datetime.now(UTC) + hours * HOUR}
    shop.write(late)
    with pytest.raises(WindowError, match="fv"):
        shop.store.materialize(NOW - 6 * HOUR, NOW + 6 * HOUR)
    with pytest.raises(WindowError, match="fv"):
        shop.push(**late)
    with pytest.raises(WindowError, match="fv"):
        shop.store.write_to_online_store("fv", pd.DataFrame([late]))
    assert shop.read() is None
