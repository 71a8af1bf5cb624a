"""Whatever happens in whatever order, every call has one outcome, and the right one."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.engine import ModelEngine
from serving.errors import (
    BackendError,
    BadRequestError,
    ClientGoneError,
    DeadlineError,
    NotReadyError,
    OverloadedError,
    ServingError,
)
from serving.interfaces import TRACKS, Answer, Call, Track
from tests.support.serving.standins import POISON, TWO_KINDS, Desk, Shelf, engine_of

BOUNDS: dict[str, Any] = {
    **{"requests": 4, "rows": 12, "total_requests": 7, "total_rows": 20, "shadow_share": 0.5},
    "poll_s": 60.0,
}
VERSIONS = st.sampled_from(["1", "2", "3"])
STEPS = st.one_of(
    st.tuples(
        st.just("ask"),
        st.sampled_from(TRACKS),
        st.integers(1, 5),
        st.sampled_from(["plain", "plain", "plain", "late", "gone", "poison"]),
    ),
    st.tuples(st.just("point"), st.sampled_from(TRACKS), st.one_of(st.none(), VERSIONS)),
    st.tuples(st.just("break"), VERSIONS, st.sampled_from(["cpu", "gpu"]), st.booleans()),
    st.tuples(st.just("slow"), VERSIONS, st.sampled_from([0.0, 0.004])),
    st.tuples(st.just("turn"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.01, 0.03])),
)


@dataclass
class Ledger:
    """What may answer each call that has no outcome yet."""

    desk: Desk
    calls: dict[str, tuple[Call, float, str]] = field(default_factory=dict)
    allowed: dict[str, set[str]] = field(default_factory=dict)

    def ask(self, track: Track, rows: int, manner: str) -> None:
        value = POISON if manner == "poison" else float(len(self.calls) % 300)
        deadline = time.monotonic() + 0.002 if manner == "late" else None
        call = self.desk.ask(value, rows=rows, track=track, deadline=deadline)
        call.is_gone = manner == "gone"
        self.calls[call.request_id] = (call, value, manner)
        tracks = self.desk.engine.tracks("m")
        named = tracks[track]
        if named is None and track == "candidate":
            named = tracks["stable"]
        self.allowed[call.request_id] = set() if named is None else {named}

    def will_point(self, track: Track, number: str | None) -> None:
        """What waits may be answered by the version that comes, or stable where that is none."""
        stable = self.desk.engine.tracks("m")["stable"]
        for name, (call, _, _) in self.calls.items():
            if name in self.desk.outcomes:
                continue
            if call.track == track and number is not None:
                self.allowed[name].add(number)
            if call.track == "candidate":  # it may have been passed on to stable
                self.allowed[name] |= {stable} if stable is not None else set()
                self.allowed[name] |= (
                    {number} if track == "stable" and number is not None else set()
                )

    def check(self) -> None:
        for name, (call, value, manner) in self.calls.items():
            (outcome,) = self.desk.outcomes[name]
            if isinstance(outcome, Answer):
                scores = outcome.outputs["score"]
                version = int(outcome.served.version)
                assert outcome.served.version in self.allowed[name]
                assert scores.shape == (call.num_rows,)
                np.testing.assert_array_equal(scores, np.float32(1000 * version + 2 * value))
            else:
                assert isinstance(outcome, _expected(manner)), outcome


def _expected(manner: str) -> tuple[type[ServingError], ...]:
    special: dict[str, tuple[type[ServingError], ...]] = {
        "late": (DeadlineError,),
        "gone": (ClientGoneError,),
        "poison": (BadRequestError,),
    }
    return (OverloadedError, NotReadyError, BackendError, *special.get(manner, ()))


def within_bounds(engine: ModelEngine) -> None:
    dispatcher = engine._dispatcher
    queues = {*dispatcher._ready, *dispatcher._shadows, *dispatcher._waiting}
    waiting = sum(len(queue.entries) for queue in queues)
    assert dispatcher.requests == waiting <= BOUNDS["total_requests"]
    assert dispatcher.rows == sum(queue.rows for queue in queues) <= BOUNDS["total_rows"]
    for queue in queues:
        assert len(queue.entries) <= queue.most_requests
        assert sum(call.num_rows for call, _ in queue.entries) == queue.rows <= queue.most_rows


async def play(steps: list[Any], batch_rows: int) -> None:
    shelf = Shelf(hardware=("cpu", "gpu"))
    engine = engine_of(shelf, hardware=TWO_KINDS, batch_rows=batch_rows, **BOUNDS)
    await engine.start()
    ledger = Ledger(Desk(engine, shelf))
    for kind, *told in steps:
        if kind == "ask":
            ledger.ask(*told)
        elif kind == "point":
            track, number = told
            ledger.will_point(track, number)
            await engine.set_tracks("m", {track: number})
        elif kind == "break":
            number, hardware, broken = told
            if (number, hardware) in shelf.behaviours:
                shelf.behaviours[number, hardware].broken = broken
        elif kind == "slow":
            for (number, _), behaviour in shelf.behaviours.items():
                if number == told[0]:
                    behaviour.seconds = told[1]
        elif kind == "turn":
            for _ in range(told[0]):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(told[0])
        within_bounds(engine)
    await ledger.desk.settled(60)
    ledger.check()
    await engine.stop()
    within_bounds(engine)
    assert all(len(outcomes) == 1 for outcomes in ledger.desk.outcomes.values())
    for state in engine._models.values():
        assert all(version.uses == 0 for version in state.versions.values())


@settings(derandomize=True)
@given(steps=st.lists(STEPS, min_size=5, max_size=45), batch_rows=st.sampled_from([1, 4, 256]))
def test_every_call_has_one_outcome_and_an_answer_is_of_a_version_that_was_in_its_track(
    steps: list[Any], batch_rows: int
) -> None:
    asyncio.run(play(steps, batch_rows))
