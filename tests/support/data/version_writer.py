"""A writer that other tests kill or run twice: writes versions of one view, each all in one value.

Its commands are the first version, `redis` or `sqlite`, and the store's address. Version `n` sets
every feature of every entity to `n`, at noon plus `n` milliseconds.
"""

import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
from feast import FeatureView, Field, RepoConfig
from feast.types import Int64

from tasks.features.online.encoding import EncodedRows
from tasks.features.online.redis_store import NewerWinsRedisOnlineStore
from tasks.features.online.sqlite_store import NewerWinsSqliteOnlineStore
from tests.support.data.feature_views import NOON, encoded, make_view, online_store, repo_config
from tests.support.host.killed import say, serve

NUM_KEYS = 1_000
BATCH_ROWS = 250
FEATURES = [f"f{i}" for i in range(12)]


def versioned_view() -> FeatureView:
    view = make_view(["number"], ["int64"], created=False)
    view.features = [Field(name=name, dtype=Int64) for name in FEATURES]
    return view


def versioned_config(kind: str, address: str) -> RepoConfig:
    return repo_config(Path(address).parent, online_store(kind, address))


def version_rows(view: FeatureView, version: int) -> Iterator[EncodedRows]:
    moment = np.datetime64((NOON + timedelta(milliseconds=version)).replace(tzinfo=None), "us")
    for start in range(0, NUM_KEYS, BATCH_ROWS):
        values = pa.array(np.full(BATCH_ROWS, version), pa.int64())
        batch = pa.record_batch(
            {
                "number": pa.array(np.arange(start, start + BATCH_ROWS), pa.int64()),
                "event": pa.array(np.full(BATCH_ROWS, moment)),
                **dict.fromkeys(FEATURES, values),
            }
        )
        yield encoded(view, batch)


def write_version(kind: str, config: RepoConfig, version: int) -> int:
    """Write one version of the whole view; return how many entities took it."""
    view = versioned_view()
    if kind == "sqlite":
        store = NewerWinsSqliteOnlineStore()
        written = store.write_rows(config, view, version_rows(view, version))
        store._get_conn(config).close()
        return written
    online = NewerWinsRedisOnlineStore()
    with online._get_client(config.online_store):
        return online.write_rows(config, view, version_rows(view, version))


def write_versions(first: str, kind: str, address: str) -> None:
    config = versioned_config(kind, address)
    for version in itertools.count(int(first)):
        write_version(kind, config, version)
        say(f"wrote {version}")


if __name__ == "__main__":
    serve(write_versions)
