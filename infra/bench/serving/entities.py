"""Requests that name entities: what `resolve` adds to the online store's own read, at 100 a second.

Both ways read the same keys in the same process, a second of each in turn, requests arriving at
random. The own read is `OnlineReader.read`, on a thread that does nothing
else, and only its own time counts. `resolve` is timed from the request's arrival on the event loop
to its inputs, so waiting for a thread, sharing reads and making arrays are all in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench, newest_record
from serving.features.config import EntityConfig
from serving.features.reader import FeastEntityReader
from serving.features.recipe import Recipe
from serving.interfaces import VersionState
from tasks.contracts.conversion import Signature, tabular_signature
from tasks.features.online.reader import OnlineReader
from tasks.kernel.settings import Settings

RATE_PER_S = 100
SECONDS = 30
LIMIT_MS = 2.0
KEYS = ("carrier", "origin", "dest", "tailnum")
NUM_ENTITIES = 200


@dataclass
class EntityTimes:
    """Milliseconds of single requests."""

    backend: str
    own_ms: list[float] = field(default_factory=list)
    resolve_ms: list[float] = field(default_factory=list)
    num_shared: int = 0

    def p(self, share: float) -> tuple[float, float]:
        """A percentile of the own read and of `resolve`."""
        return float(np.quantile(self.own_ms, share)), float(np.quantile(self.resolve_ms, share))


def figures(bench: Bench) -> Measured:
    """The promised figure, with what it was measured on."""
    times = _times(bench.settings, bench.size(SECONDS, 1))
    own, ours = times.p(0.99)
    own_half, ours_half = times.p(0.5)
    evidence = (
        f"{times.backend}: own read p50 {own_half:.2f} p99 {own:.2f} ms, resolve p50 "
        f"{ours_half:.2f} p99 {ours:.2f} ms, {len(times.resolve_ms)} requests at {RATE_PER_S}/s"
    )
    return [at_most("entity request p99 above the store's own, ms", ours - own, LIMIT_MS, evidence)]


def _times(settings: Settings, seconds: int) -> EntityTimes:
    """Times of requests for the last rows of the finished loop's training set."""
    record = newest_record(settings)
    columns = record.dataset.snapshot.columns
    names = [name for name in (*columns.categorical, *columns.numeric) if "__" not in name]
    asked = list(dict.fromkeys([*KEYS, *names]))
    rows = pd.read_parquet(settings.store.path(record.dataset.snapshot.data), columns=asked)
    rows = rows.dropna().tail(NUM_ENTITIES)
    entities: dict[str, list[Any]] = {name: rows[name].tolist() for name in asked}
    ref = record.version
    return measure_entities(settings, ref.name, str(ref.version), entities, seconds=seconds)


def measure_entities(
    settings: Settings,
    model: str,
    version: str,
    entities: Mapping[str, list[Any]],
    *,
    config: EntityConfig | None = None,
    origins: Callable[[str, str], Any] | None = None,
    seconds: int = SECONDS,
) -> EntityTimes:
    """Times of one-row requests for the rows of `entities`, one after the other.

    Args:
        settings: whose online store is read.
        model: registered model with feature views, and its version.
        entities: key and other request columns, some rows.
        config: of the reader.
        origins: what the version was trained with; None asks the registry.
        seconds: of each of the two ways.
    """
    reader = FeastEntityReader(
        settings,
        config,
        states=lambda: [VersionState(model, version, "READY", slots=("stable",))],
        origins=origins,
    )
    return asyncio.run(_measured(reader, (model, version), entities, seconds))


async def _measured(
    reader: FeastEntityReader,
    key: tuple[str, str],
    entities: Mapping[str, list[Any]],
    seconds: int,
) -> EntityTimes:
    await reader.start()
    recipe = reader._known[key]
    assert isinstance(recipe, Recipe)
    signature = tabular_signature(recipe.columns)
    count = len(next(iter(entities.values())))
    requests = [{name: [values[n]] for name, values in entities.items()} for n in range(count)]
    times, draw = EntityTimes(recipe.reader.backend), random.Random(7)
    await _through_resolve(reader, key[0], signature, requests, draw)  # connections, caches
    for _ in range(seconds):
        times.own_ms += await asyncio.to_thread(_own, recipe.reader, reader, requests, draw)
        times.resolve_ms += await _through_resolve(reader, key[0], signature, requests, draw)
    times.num_shared = reader.counters()["shared"]
    await reader.stop()
    return times


def _own(
    online: OnlineReader,
    reader: FeastEntityReader,
    requests: list[dict[str, list[Any]]],
    draw: random.Random,
) -> list[float]:
    """A second of reads that nothing else disturbs."""
    found = []
    for wait_s in _waits(draw):
        time.sleep(wait_s)
        request = draw.choice(requests)
        started = time.perf_counter()
        online.read(request, reader._moment())
        found.append(1e3 * (time.perf_counter() - started))
    return found


async def _through_resolve(
    reader: FeastEntityReader,
    model: str,
    signature: Signature,
    requests: list[dict[str, list[Any]]],
    draw: random.Random,
) -> list[float]:
    """A second of requests that do not wait for each other."""
    found: list[float] = []

    async def one(request: dict[str, list[Any]]) -> None:
        started = time.perf_counter()
        await reader.resolve(model, request, signature)
        found.append(1e3 * (time.perf_counter() - started))

    tasks = []
    for wait_s in _waits(draw):
        await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(draw.choice(requests))))
    await asyncio.gather(*tasks)
    return found


def _waits(draw: random.Random) -> list[float]:
    return [draw.expovariate(RATE_PER_S) for _ in range(RATE_PER_S)]
