"""What the engine of a serving process costs and holds, without a network in front of it.

Two versions of a small model are made, converted and registered in a temporary folder, and served
by the engine as a serving process has it. Four things are asked: what a call costs above the
runtime's own `session.run`, how a slow model stands four times the load that it can bear, whether
a swap under load loses or confuses an answer, and how soon the former version is silent.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np
import uvloop

from infra.bench.figures import Figure, Measured, at_least, at_most
from infra.bench.parts import Bench
from infra.bench.serving.installation import COLUMNS, MODEL, BenchHome
from serving.config import EngineConfig, ServedModel
from serving.engine.engine import ModelEngine
from serving.engine.loading import RegistryCatalogue
from serving.engine.queues import Limits
from serving.engine.versions import Backend
from serving.errors import OverloadedError, ServingError
from serving.interfaces import Answer, Array, Call

CHUNK = 200
CONCURRENCY = 64
SLOW_S = 0.005
"""Of a batch of the model that is overloaded."""
SLOW_ROWS = 4
MOST_LATE_S = 0.02
ROLLBACK_S = 0.02
NUM_ROWS = 512
TOLERANCE = 1e-5
"""Within which an answer is that of a version; those of versions are farther apart."""


Outcome = Answer | ServingError
Seen = list[tuple[float, Call, Outcome]]
"""What became of calls, and when."""


def figures(bench: Bench) -> Measured:
    """All figures, with models made in the bench's folder."""
    world = BenchHome(bench.folder)
    refs = {str(seed + 1): world.add(seed, promote=not seed) for seed in range(3)}
    rows = np.random.default_rng(0).normal(size=(NUM_ROWS, COLUMNS)).astype(np.float32)
    expected = {number: world.answers(ref, rows) for number, ref in refs.items()}

    async def measured() -> Measured:
        return [
            *await _overhead(world, bench.size(150, 10)),
            *await _least_disturbed_overload(world, bench),
            *await _swap(world, rows, expected, bench.size(100_000, 2_000)),
            *await _roll_back(world),
        ]

    return uvloop.run(measured())


@asynccontextmanager
async def _serving(
    world: BenchHome, batch_rows: int = 256, most_waiting: int = 256
) -> AsyncIterator[tuple[ModelEngine, Backend]]:
    """The engine while it runs, and what computes the answers of version 1."""
    models = (ServedModel(name=MODEL, on_move="offer"),)
    limits = Limits(poll_s=600.0, requests=most_waiting)
    config = EngineConfig(batch_rows=batch_rows)
    catalogue = RegistryCatalogue(world.location, world.home, config, models)
    engine = ModelEngine(config, models, catalogue, limits=limits)
    await engine.start()
    yield engine, _backend(engine, "1")
    await engine.stop()


def _backend(engine: ModelEngine, version: str) -> Backend:
    return engine.served(MODEL).versions[version].backends[0]


async def _ask(
    engine: ModelEngine,
    call_of: Callable[[int], Call],
    num_calls: int,
    num_open: int,
    take: Callable[[Call, Outcome], None] = lambda call, outcome: None,
) -> None:
    """Submit calls, of which always so many are open, until all have an outcome."""
    ended = asyncio.get_running_loop().create_future()
    num_submitted = num_ended = 0

    def ask() -> None:
        nonlocal num_submitted
        num_submitted += 1
        engine.submit(call_of(num_submitted), done)

    def done(call: Call, outcome: Outcome) -> None:
        nonlocal num_ended
        num_ended += 1
        take(call, outcome)
        if num_submitted < num_calls:
            ask()
        elif num_ended == num_calls:
            ended.set_result(None)

    for _ in range(num_open):
        ask()
    await ended


# Cost of a call


async def _overhead(world: BenchHome, chunks: int) -> Measured:
    """CPU time of this thread, the engine and the bare runtime in turns."""

    async def bare() -> None:
        for _ in range(CHUNK):
            backend.score(inputs)

    async def empty_turns() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def turn(left: int) -> None:
            if left:
                loop.call_soon(turn, left - 1)
            else:
                ended.set_result(None)

        turn(CHUNK)
        await ended

    async def cpu_us(work: Awaitable[None], num_calls: int) -> float:
        started = time.thread_time()
        await work
        return (time.thread_time() - started) / num_calls * 1e6

    async with _serving(world) as (engine, backend):
        inputs = dict(backend.probe)
        row = _call(inputs, 1)
        taken = [
            (
                await cpu_us(bare(), CHUNK),
                await cpu_us(empty_turns(), CHUNK),
                await cpu_us(_ask(engine, lambda n: row, CHUNK, 1), CHUNK),
                await cpu_us(_ask(engine, lambda n: row, CONCURRENCY, CONCURRENCY), CONCURRENCY),
            )
            for _ in range(chunks)
        ]
    # Of the turns in which other programs took least of the processor's caches.
    direct, turn, alone, rows = np.quantile(np.array(taken), 0.1, axis=0).tolist()
    evidence = (
        f"CPU: session.run {direct:.1f} us, an empty turn of the loop {turn:.1f} us, through the "
        f"engine {alone:.1f} us"
    )
    together = f"{rows:.1f} us of CPU a call"
    return [
        at_most("engine above session.run and a turn, us", alone - direct - turn, 6.0, evidence),
        at_most("1 row of 64 together, of its own session.run", rows / direct, 0.6, together),
    ]


# Overload


async def _least_disturbed_overload(world: BenchHome, bench: Bench) -> Measured:
    """The round in which most figures hold: others stop the whole process for tenths of a second.

    Ends with the first round whose figures all hold.
    """
    rounds: list[list[Figure]] = []
    for _ in range(bench.size(3, 1)):
        rounds.append(await _overload(world, bench.size(4.0, 1.0)))
        if all(figure.holds for figure in rounds[-1]):
            break
    best = max(rounds, key=lambda figures: sum(figure.holds for figure in figures))
    return list(best)


async def _overload(world: BenchHome, seconds: float) -> list[Figure]:
    async with _serving(world, batch_rows=SLOW_ROWS, most_waiting=64) as (engine, backend):
        _slow_down(backend, SLOW_S)
        row = dict(backend.probe)
        await _offer(engine, row, 0.5, rate=2000.0)  # learns the model's time
        capacity = await _capacity(engine, row)
        seen = await _offer(engine, row, seconds, 4 * capacity)
        recovery = await _recovery(engine, row, time.monotonic())
        # Other programs may have disturbed one.
        capacity = max(capacity, await _capacity(engine, row))
    answered_ms = _after_ms(seen, Answer)
    late = np.array(_after_ms(seen, OverloadedError) or [np.inf])
    share, answers_ms = len(answered_ms) / seconds / capacity, np.array(answered_ms or [np.inf])
    offered = f"{len(seen) / seconds:.0f}/s were offered"
    loads = f"{capacity:.0f} calls/s can be answered, {offered}"
    refusals = (
        f"{len(late)} refusals: median {np.median(late):.2f} ms, 99 % {np.quantile(late, 0.99):.2f}"
        f" ms, longest {late.max():.1f} ms"
    )
    answers = f"of those accepted: median {np.median(answers_ms):.1f} ms; the bound is the goal"
    goal_ms = ServedModel(name=MODEL).goal_ms
    slow_ms = float(np.quantile(answers_ms, 0.99))
    return [
        at_least("answered at 4 x capacity, of capacity", share, 0.95, loads),
        at_least("refusals within 5 ms, share", float(np.mean(late <= 5.0)), 0.99, refusals),
        at_most("answers at 4 x capacity, 99 %, ms", slow_ms, goal_ms, answers),
        at_most("recovery after it, s", recovery, 1.0, "until a call is answered in 50 ms"),
    ]


def _after_ms(seen: Seen, kind: type[Outcome]) -> list[float]:
    """How long after their arrival calls had an outcome of a kind."""
    return [1e3 * (at - call.arrived) for at, call, outcome in seen if isinstance(outcome, kind)]


async def _capacity(engine: ModelEngine, row: Mapping[str, Array]) -> float:
    """Calls a second that are answered when two batches always wait: fewer than are refused."""
    seen: Seen = []
    started = time.monotonic()
    num_calls = round(2 * SLOW_ROWS / SLOW_S)
    await _ask(engine, lambda n: _call(row, 1), num_calls, 3 * SLOW_ROWS, _noting(seen))
    return len(_after_ms(seen, Answer)) / (time.monotonic() - started)


def _noting(seen: Seen) -> Callable[[Call, Outcome], None]:
    return lambda call, outcome: seen.append((time.monotonic(), call, outcome))


async def _offer(
    engine: ModelEngine, row: Mapping[str, Array], seconds: float, rate: float
) -> Seen:
    """Submit calls by the clock, whatever becomes of them; ends when all have an outcome."""
    seen: Seen = []
    submitted = 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        due = round((now - began) * rate)
        # After a pause of the whole machine the backlog is not thrown in at once.
        for _ in range(min(due - submitted, round(rate * MOST_LATE_S))):
            engine.submit(_call(row, 1), _noting(seen))
        submitted = due
        await asyncio.sleep(0.001)
    await engine._dispatcher.drained(math.inf)
    await asyncio.sleep(0)
    return seen


async def _recovery(engine: ModelEngine, row: Mapping[str, Array], since: float) -> float:
    while True:
        asked = time.monotonic()
        await _ask(engine, lambda n: _call(row, 1), 1, 1)
        if time.monotonic() - asked < 0.05:
            return time.monotonic() - since


def _slow_down(backend: Backend, seconds: float) -> None:
    """Let a batch take as long as one of a large model on a device of its own."""
    score = backend.score

    def slow(arrays: dict[str, Array]) -> Array:
        time.sleep(seconds)
        answers: Array = score(arrays)
        return answers

    backend.score = slow


# Swapping and going back


async def _swap(
    world: BenchHome, rows: Array, expected: Mapping[str, Array], num_calls: int
) -> Measured:
    """Two versions take turns under load, while a third one is loaded and unloaded all the time."""
    calls = [_call({"rows": rows[n : n + 1]}, 1, str(n)) for n in range(NUM_ROWS)]
    counted: Counter[str] = Counter()

    def take(call: Call, outcome: Outcome) -> None:
        if not isinstance(outcome, Answer):
            counted["lost"] += 1
            return
        version, seen = outcome.served.version, outcome.outputs["score"]
        gap = abs(float(seen[0]) - float(expected[version][int(call.request_id)]))
        counted[version] += 1
        counted["wrong"] += seen.shape != (1,) or not gap < TOLERANCE

    async with _serving(world) as (engine, _):
        await engine.load(MODEL, "2")
        swapping = asyncio.ensure_future(_keep_swapping(engine))
        await _ask(engine, lambda n: calls[n % NUM_ROWS], num_calls, CONCURRENCY, take)
        swapping.cancel()
        swaps, loads = await swapping
    distance = float(np.abs(expected["1"] - expected["2"]).min())
    total = counted["1"] + counted["2"] + counted["lost"]
    bad = counted["lost"] + counted["wrong"] + abs(num_calls - total)
    evidence = (
        f"{total} calls, {swaps} swaps, {loads} loads beside them; versions differ by "
        f"{distance:.1e} and more; {counted['1']} and {counted['2']} answers"
    )
    return [at_most(f"lost or wrong answers of {num_calls:,}", bad, 0, evidence)]


async def _keep_swapping(engine: ModelEngine) -> tuple[int, int]:
    swaps = loads = 0
    try:
        while True:
            for number in ("2", "1"):
                await engine.set_tracks(MODEL, {"stable": number})
                swaps += 1
                await asyncio.sleep(0.02)
            if not swaps % 10:
                await engine.load(MODEL, "3")
                await engine.unload(MODEL, "3")
                loads += 1
    except asyncio.CancelledError:
        return swaps, loads


async def _roll_back(world: BenchHome) -> Measured:
    """From the decision to the last answer of the version that has to go, its queue full."""
    async with _serving(world, batch_rows=8) as (engine, backend):
        await engine.set_tracks(MODEL, {"stable": "2"})
        _slow_down(_backend(engine, "2"), ROLLBACK_S)
        offering = asyncio.ensure_future(_offer(engine, dict(backend.probe), 2.0, rate=1000.0))
        await asyncio.sleep(1.0)
        waiting, decided = engine._dispatcher.requests, time.monotonic()
        await engine.set_tracks(MODEL, {"stable": "1"})
        seen = await offering
    last = {o.served.version: at for at, _, o in seen if isinstance(o, Answer)}
    then = "version 1 answered" if last.get("1", 0) > decided else "nobody answered"
    evidence = f"{waiting} calls waited for a model of {ROLLBACK_S * 1e3:.0f} ms a batch; {then}"
    seconds = max(0.0, last["2"] - decided)
    return [at_most("rollback: decision to last old answer, s", seconds, 1.0, evidence)]


def _call(inputs: Mapping[str, Array], rows: int, request_id: str = "r") -> Call:
    return Call(MODEL, inputs, rows, request_id)
