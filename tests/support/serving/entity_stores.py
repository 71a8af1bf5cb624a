"""A feature store of three days with real flights, online up to a full hour."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from serving.config import EntityConfig
from serving.features.reader import FeastEntityReader
from serving.features.recipe import ModelOrigin
from serving.interfaces import VersionState
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureSnapshot, FeatureTables
from tasks.kernel.settings import Settings
from tests.support.data.feature_views import online_store
from tests.support.data.installation import Installation
from tests.support.data.profiles import write_profiles
from tests.support.data.repository import MIDNIGHT, days
from tests.support.services.servers import RedisServer, redis_server

WATERMARK = MIDNIGHT + timedelta(days=2, hours=13)
"""A full hour: its weather is known an hour later, its outcomes five minutes later."""
MODEL = "flight-delay"
KEYS = ("carrier", "origin", "dest", "tailnum")
SCHEDULE = (
    "weekday",
    "departure_hour",
    "minute_of_day",
    "scheduled_minutes",
    "arrival_minute_of_day",
    "distance",
    "departures_in_hour",
)


@dataclass
class Serving:
    """An installation whose features are online, and one model that was trained on them."""

    installation: Installation
    tables: FeatureTables
    snapshot: FeatureSnapshot
    server: RedisServer | None = None

    @property
    def settings(self) -> Settings:
        return self.installation.settings

    @property
    def origin(self) -> ModelOrigin:
        return ModelOrigin.model_validate(self.snapshot.model_dump())

    def states(self) -> list[VersionState]:
        return [VersionState(MODEL, "1", "READY", tracks=("stable",))]

    def rows(self) -> pd.DataFrame:
        """Rows of the snapshot in the minutes after the watermark."""
        rows = self.installation.rows(self.snapshot)
        moments = rows["event_timestamp"]
        return rows[(moments >= WATERMARK) & (moments < WATERMARK + timedelta(minutes=5))]


def made(kind: str, folder: Path, stack: ExitStack) -> Serving:
    folder.mkdir()
    installation = Installation.at(folder, num_days=3)
    server = None
    if kind == "redis":
        server = stack.enter_context(redis_server(folder))
        use_redis(installation.repository.path, server)
    tables = installation.refresh(days(0, 3))
    installation.materialize(tables, TimeWindow(start=MIDNIGHT, end=WATERMARK))
    installation.publish(tables)
    return Serving(installation, tables, installation.snapshot(tables, days(2, 1)), server)


def use_redis(repo: Path, server: RedisServer) -> None:
    file = write_profiles(repo)
    head, rest = file.read_text().split("online_store:\n")
    rest = rest[rest.index("batch_engine:") :]
    online = {"online_store": online_store("redis", server.connection_string)}
    file.write_text(head + yaml.safe_dump(online) + rest)


@asynccontextmanager
async def reading(
    serving: Serving,
    origin: ModelOrigin | None = None,
    states: list[VersionState] | None = None,
    **config: Any,
) -> AsyncIterator[FeastEntityReader]:
    """A reader from its start to its end, at the watermark where nothing else is said.

    It is of the version that serves, unless another origin or other states are given.
    """
    reader = FeastEntityReader(
        serving.settings,
        EntityConfig(**{"moment": WATERMARK, **config}),
        states=serving.states if states is None else lambda: states,
        origins=lambda model, version: origin or serving.origin,
    )
    await reader.start()
    try:
        yield reader
    finally:
        await reader.stop()


def request_of(rows: pd.DataFrame) -> dict[str, list[Any]]:
    return {name: rows[name].tolist() for name in (*KEYS, *SCHEDULE)}
