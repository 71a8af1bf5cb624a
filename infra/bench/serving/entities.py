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
from typing import Any

import numpy as np
import pandas as pd

from infra.bench.figures import Figure, Measured, at_most
from infra.bench.parts import Bench, newest_record
from serving.features.reader import FeastEntityReader
from serving.interfaces import VersionState
from tasks.features.online.reader import OnlineReader

RATE_PER_S = 100
SECONDS = 30
LIMIT_MS = 2.0
KEYS = ("carrier", "origin", "dest", "tailnum")
NUM_ENTITIES = 200


def figures(bench: Bench) -> Measured:
    """The promised figure: requests for the last rows of the finished loop's training set."""
    record = newest_record(bench.settings)
    columns = record.dataset.snapshot.columns
    names = [name for name in (*columns.categorical, *columns.numeric) if "__" not in name]
    asked = list(dict.fromkeys([*KEYS, *names]))
    file = bench.settings.store.path(record.dataset.snapshot.data)
    rows = pd.read_parquet(file, columns=asked).dropna().tail(NUM_ENTITIES)
    requests = [{name: [row[name]] for name in asked} for row in rows.to_dict("records")]
    model, version = record.version.name, str(record.version.version)
    states = [VersionState(model, version, "READY", tracks=("stable",))]
    reader = FeastEntityReader(bench.settings, None, states=lambda: states)
    times = asyncio.run(_measured(reader, (model, version), requests, bench.size(SECONDS, 1)))
    return [_figure(*times)]


def _figure(backend: str, own_ms: list[float], resolve_ms: list[float]) -> Figure:
    (own_half, own), (half, ours) = (np.quantile(ms, (0.5, 0.99)) for ms in (own_ms, resolve_ms))
    evidence = (
        f"{backend}: own read p50 {own_half:.2f} p99 {own:.2f} ms, resolve p50 {half:.2f} p99 "
        f"{ours:.2f} ms, {len(resolve_ms)} requests at {RATE_PER_S}/s"
    )
    return at_most("entity request p99 above the store's own, ms", ours - own, LIMIT_MS, evidence)


async def _measured(
    reader: FeastEntityReader,
    key: tuple[str, str],
    requests: list[dict[str, list[Any]]],
    seconds: int,
) -> tuple[str, list[float], list[float]]:
    """The store's name, and milliseconds of requests of both ways, a second of each in turn."""
    await reader.start()
    recipe = reader.recipe(key)
    assert recipe is not None
    own_ms: list[float] = []
    resolve_ms: list[float] = []
    draw = random.Random(7)
    await _through_resolve(reader, key[0], requests, draw)  # connections, caches
    for _ in range(seconds):
        own_ms += await asyncio.to_thread(_own, recipe.reader, reader, requests, draw)
        resolve_ms += await _through_resolve(reader, key[0], requests, draw)
    await reader.stop()
    return recipe.reader.backend, own_ms, resolve_ms


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
        online.read(request, reader.moment())
        found.append(1e3 * (time.perf_counter() - started))
    return found


async def _through_resolve(
    reader: FeastEntityReader,
    model: str,
    requests: list[dict[str, list[Any]]],
    draw: random.Random,
) -> list[float]:
    """A second of requests that do not wait for each other."""
    found: list[float] = []

    async def one(request: dict[str, list[Any]]) -> None:
        started = time.perf_counter()
        await reader.resolve(model, request)
        found.append(1e3 * (time.perf_counter() - started))

    tasks = []
    for wait_s in _waits(draw):
        await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(draw.choice(requests))))
    await asyncio.gather(*tasks)
    return found


def _waits(draw: random.Random) -> list[float]:
    return [draw.expovariate(RATE_PER_S) for _ in range(RATE_PER_S)]
