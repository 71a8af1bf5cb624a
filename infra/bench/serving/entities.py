"""Requests that name entities: what `resolve` adds to the online store's own read, at 100 a second.

Both ways read the same keys in the same process, a second of each in turn, requests arriving at
random. The own read is `OnlineReader.read`, on a thread that does nothing
else, and only its own time counts. `resolve` is timed from the request's arrival on the event loop
to its inputs, so waiting for a thread, sharing reads and making arrays are all in it.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from infra.bench.figures import Measured, at_most
from infra.bench.figures import seconds as seconds_of
from infra.bench.parts import Bench, newest_record
from serving.features.reader import FeastEntityReader
from serving.interfaces import VersionState

RATE_PER_S = 100
KEYS = ("carrier", "origin", "dest", "tailnum")
Request = dict[str, list[Any]]


def figures(bench: Bench) -> Measured:
    """The promised figure: requests for the last rows of the finished loop's training set."""
    record = newest_record(bench.settings)
    columns = record.dataset.snapshot.columns
    names = [name for name in (*columns.categorical, *columns.numeric) if "__" not in name]
    asked = list(dict.fromkeys([*KEYS, *names]))
    file = bench.settings.store.path(record.dataset.snapshot.data)
    rows = pd.read_parquet(file, columns=asked).dropna().tail(200)
    requests = [{name: [row[name]] for name in asked} for row in rows.to_dict("records")]
    model, version = record.version.name, str(record.version.version)
    states = [VersionState(model, version, "READY", tracks=("stable",))]
    reader = FeastEntityReader(bench.settings, None, states=lambda: states)
    measured = _measured(reader, (model, version), requests, bench.size(30, 1))
    backend, *times_ms = asyncio.run(measured)
    (own_half, own), (half, ours) = (np.quantile(ms, (0.5, 0.99)) for ms in times_ms)
    evidence = (
        f"{backend}: own read p50 {own_half:.2f} p99 {own:.2f} ms, resolve p50 {half:.2f} p99 "
        f"{ours:.2f} ms, {len(times_ms[1])} requests at {RATE_PER_S}/s"
    )
    return [at_most("entity request p99 above the store's own, ms", ours - own, 2.0, evidence)]


async def _measured(
    reader: FeastEntityReader, key: tuple[str, str], requests: Sequence[Request], seconds: int
) -> tuple[str, list[float], list[float]]:
    """The store's name, and milliseconds of requests of both ways, a second of each in turn."""
    await reader.start()
    recipe = reader.recipe(key)
    assert recipe is not None
    online, draw = recipe.reader, random.Random(7)
    own_ms: list[float] = []
    resolve_ms: list[float] = []

    def arrivals() -> list[tuple[float, Request]]:
        """A second of requests, each with the time before it."""
        return [(draw.expovariate(RATE_PER_S), draw.choice(requests)) for _ in range(RATE_PER_S)]

    def own() -> None:
        """Reads that nothing else disturbs."""
        for wait_s, asked in arrivals():
            time.sleep(wait_s)
            own_ms.append(1e3 * seconds_of(partial(online.read, asked, reader.moment())))

    async def resolve(asked: Request, found: list[float]) -> None:
        started = time.perf_counter()
        await reader.resolve(key[0], asked)
        found.append(1e3 * (time.perf_counter() - started))

    async def through_resolve(found: list[float]) -> None:
        """Requests that do not wait for each other."""
        async with asyncio.TaskGroup() as group:
            for wait_s, asked in arrivals():
                await asyncio.sleep(wait_s)
                group.create_task(resolve(asked, found))

    await through_resolve([])  # connections, caches
    for _ in range(seconds):
        await asyncio.to_thread(own)
        await through_resolve(resolve_ms)
    await reader.stop()
    return online.backend, own_ms, resolve_ms
