"""Calls through the engine: batches, tracks, bounds, deadlines, versions."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serving import errors
from serving.config import ServedModel
from serving.engine.versions import LoadedVersion, VersionKey
from serving.interfaces import Call, ServedBatch
from tests.support.serving.standins import (
    SEQUENCES,
    SIGNATURE,
    Desk,
    Shelf,
    Witness,
    asked,
    held,
    made_call,
    serving,
    until,
    version_of,
)

pytestmark = pytest.mark.anyio


async def test_calls_that_come_together_are_computed_together_and_answered_apart() -> None:
    shelf, witness = Shelf(), Witness()
    async with serving(shelf, witness=witness) as desk:
        calls = [desk.ask(float(n), rows=n) for n in (1, 2, 3)]
        assert not desk.outcomes  # never within submit
        await desk.settled()
        for n, call in zip((1, 2, 3), calls, strict=True):
            answer = desk.answer(call)
            assert answer.outputs["score"].tolist() == [1000.0 + 2 * n] * n
            assert (answer.served.version, answer.served.track) == ("1", "stable")
        assert shelf.behaviours["1", "cpu"].sizes == [6]
        (batch,) = witness.batches
        assert [call.request_id for call in batch.calls] == ["r0", "r1", "r2"]
        assert batch.inputs["x"].shape == (6, 2)
        assert batch.outputs["score"].shape == (6,)
        assert batch.started <= batch.finished


async def test_a_batch_has_no_more_rows_than_allowed_unless_one_call_brings_them() -> None:
    shelf = Shelf()
    async with serving(shelf, batch_rows=4) as desk:
        for rows in (3, 2, 2, 9, 1):
            desk.ask(rows=rows)
        await desk.settled()
        assert shelf.behaviours["1", "cpu"].sizes == [3, 4, 9, 1]


async def test_sequences_of_one_length_are_computed_together() -> None:
    shelf = Shelf(signatures={"1": SEQUENCES})
    async with serving(shelf) as desk:
        calls = [
            desk.ask(inputs={"x": np.ones((1, length), np.float32)}) for length in (3, 5, 3, 5, 3)
        ]
        await desk.settled()
        assert shelf.behaviours["1", "cpu"].sizes == [3, 2]
        sums = [desk.answer(call).outputs["sums"].tolist() for call in calls]
        assert sums == [[[1000.0 + n, -1000.0 - n]] for n in (3, 5, 3, 5, 3)]


async def test_past_the_bounds_calls_are_refused_in_the_next_turn_and_told_when_to_come() -> None:
    async with serving(Shelf(seconds=0.01), requests=3, rows=10, batch_rows=1) as desk:
        await held(desk)
        waiting = [desk.ask() for _ in range(3)]
        refused = desk.ask()
        await asyncio.sleep(0)
        error = desk.error(refused)
        assert isinstance(error, errors.OverloadedError)
        assert error.retry_after_s is not None
        assert "3 requests with 3 rows wait for m (stable)" in str(error)
        await desk.finish()
        assert all(version_of(desk.answer(call)) == "1" for call in waiting)


async def test_mirrored_calls_leave_most_of_the_room_to_those_that_somebody_waits_for() -> None:
    shelf = Shelf(seconds=0.01)
    async with serving(shelf, requests=8, total_requests=8) as desk:
        await desk.engine.set_tracks("m", {"shadow": "2"})
        for behaviour in shelf.behaviours.values():
            behaviour.gate.clear()
        begun = [desk.ask(), desk.ask(track="shadow")]
        await until(lambda: all(b.sizes for b in shelf.behaviours.values()))
        mirrored = [desk.ask(track="shadow") for _ in range(3)]  # a quarter of 8 has room
        await asyncio.sleep(0)
        assert isinstance(desk.error(mirrored[2]), errors.OverloadedError)
        real = [desk.ask() for _ in range(6)]
        await asyncio.sleep(0)
        assert all(call.request_id not in desk.outcomes for call in (*begun, *real))
        await desk.finish()
        assert {version_of(desk.answer(call)) for call in real} == {"1"}


async def test_calls_that_nobody_waits_for_are_not_computed() -> None:
    async with serving(Shelf(seconds=0.01)) as desk:
        behaviour = await held(desk)
        late = desk.ask(deadline=time.monotonic() + 0.01)
        gone = desk.ask()
        gone.is_gone = True
        kept = desk.ask()
        await until(lambda: late.request_id in desk.outcomes)  # while the backend is at work
        assert isinstance(desk.error(late), errors.DeadlineError)
        await desk.finish()
        assert isinstance(desk.error(gone), errors.ClientGoneError)
        assert version_of(desk.answer(kept)) == "1"
        assert behaviour.sizes == [1, 1]


async def test_what_waits_is_answered_by_the_new_version_and_the_old_one_goes() -> None:
    shelf = Shelf(seconds=0.01)
    async with serving(shelf) as desk:
        behaviour = shelf.behaviours["1", "cpu"]
        behaviour.gate.clear()
        begun = desk.ask()
        await until(lambda: behaviour.sizes == [1])
        waiting = desk.ask()
        await desk.engine.set_tracks("m", {"stable": "3"})
        await desk.engine.set_tracks("m", {"stable": "2"})
        assert [s.version for s in desk.engine.states()] == ["2", "3"]
        await desk.finish()
        assert version_of(desk.answer(begun)) == "1"
        assert version_of(desk.answer(waiting)) == "2"


async def test_what_waits_for_a_version_that_takes_something_else_is_answered_by_it() -> None:
    async with serving(Shelf(seconds=0.01, signatures={"2": SEQUENCES})) as desk:
        await held(desk)
        waiting = desk.ask()
        await desk.engine.set_tracks("m", {"stable": "2"})
        new = desk.ask(inputs={"x": np.ones((1, 4), np.float32)})
        assert desk.engine.signature("m") == SEQUENCES
        await desk.finish()
        assert version_of(desk.answer(waiting)) == "1"
        assert version_of(desk.answer(new), "sums") == "2"


async def test_the_former_stable_version_stays_warm_so_going_back_loads_nothing() -> None:
    shelf = Shelf()
    async with serving(shelf) as desk:
        await desk.engine.set_tracks("m", {"stable": "2"})
        await desk.engine.set_tracks("m", {"stable": "1"})
        assert shelf.opened == ["1", "2"]
        await desk.engine.set_tracks("m", {"stable": "3"})
        assert {s.version for s in desk.engine.states()} == {"1", "3"}
        assert version_of(desk.answer(await asked(desk))) == "3"


async def test_going_back_does_not_wait_for_a_version_that_is_loaded() -> None:
    class Slow(Shelf):
        gate = threading.Event()

        def open(self, key: VersionKey) -> LoadedVersion:
            if key.version == "3":
                self.gate.wait(20)
            return super().open(key)

    shelf = Slow()
    async with serving(shelf) as desk:
        await desk.engine.set_tracks("m", {"stable": "2"})
        loading = asyncio.ensure_future(desk.engine.set_tracks("m", {"shadow": "3"}))
        try:
            await until(lambda: any(s.state == "LOADING" for s in desk.engine.states()))
            behind = asyncio.ensure_future(desk.engine.set_tracks("m", {"candidate": "1"}))
            await asyncio.sleep(0)
            assert not behind.done()  # in the order in which they were asked for
        finally:
            shelf.gate.set()
            await asyncio.gather(loading, behind)
        shelf.gate.clear()
        await desk.engine.unload("m", "3")
        loading = asyncio.ensure_future(desk.engine.load("m", "3"))
        try:
            await until(lambda: any(s.state == "LOADING" for s in desk.engine.states()))
            await asyncio.wait_for(desk.engine.set_tracks("m", {"stable": "1"}), 20)
            assert desk.engine.tracks("m")["stable"] == "1"
            assert not loading.done()
            assert version_of(desk.answer(await asked(desk))) == "1"
        finally:
            shelf.gate.set()
            await loading


async def test_tracks_and_versions_that_are_asked_for_answer() -> None:
    async with serving(Shelf()) as desk:
        await desk.engine.set_tracks("m", {"candidate": "2", "shadow": "3"})
        await desk.engine.load("m", "4")
        for told, expected in (
            ({"track": "stable"}, ("1", "stable")),
            ({"track": "candidate"}, ("2", "candidate")),
            ({"track": "shadow"}, ("3", "shadow")),
            ({"version": "4"}, ("4", "stable")),
            ({"version": "2"}, ("2", "stable")),
        ):
            answer = desk.answer(await asked(desk, **told))
            assert (version_of(answer), answer.served.track) == expected
        unknown = await asked(desk, version="9")
        assert isinstance(desk.error(unknown), errors.UnknownModelError)
        other = await asked(desk, track="candidate", version="77")
        assert "version 77 is not loaded here; loaded are 1, 2, 3, 4" in str(desk.error(other))


async def test_an_emptied_candidate_track_is_answered_by_stable_and_says_so() -> None:
    async with serving(Shelf(seconds=0.01)) as desk:
        await desk.engine.set_tracks("m", {"candidate": "2"})
        await held(desk, "2", track="candidate")
        waiting = desk.ask(track="candidate")
        await desk.engine.set_tracks("m", {"candidate": None})
        after = desk.ask(track="candidate")
        shadow = desk.ask(track="shadow")
        await until(lambda: after.request_id in desk.outcomes)
        for call in (waiting, after):
            answer = desk.answer(call)
            assert (version_of(answer), answer.served.track) == ("1", "stable")
        assert "no shadow version" in str(desk.error(shadow))
        await desk.finish()
        assert desk.engine.counters()["passed_on"] == {("m",): 2}


async def test_a_version_that_cannot_be_loaded_changes_no_track() -> None:
    async with serving(Shelf(bad={"2": errors.NotReadyError("golden batch differs")})) as desk:
        with pytest.raises(errors.NotReadyError, match="golden batch differs"):
            await desk.engine.set_tracks("m", {"candidate": "3", "stable": "2"})
        assert desk.engine.tracks("m") == {"stable": "1", "candidate": None, "shadow": None}
        with pytest.raises(errors.UnknownModelError):
            await desk.engine.load("m", "99")
        (state,) = [s for s in desk.engine.states() if s.version == "2"]
        assert (state.state, state.reason) == ("UNAVAILABLE", "golden batch differs")
        assert version_of(desk.answer(await asked(desk))) == "1"


async def test_no_more_versions_are_loaded_than_allowed() -> None:
    async with serving(Shelf(), max_versions=2) as desk:
        full = pytest.raises(errors.NotReadyError, match="2 versions are loaded and all are in use")
        await desk.engine.set_tracks("m", {"stable": "2"})
        with full:  # the former one, which a track is about to mean, makes no room
            await desk.engine.set_tracks("m", {"stable": "1", "candidate": "3"})
        assert version_of(desk.answer(await asked(desk))) == "2"
        await desk.engine.set_tracks("m", {"candidate": "3"})  # takes the former one's place
        assert {s.version for s in desk.engine.states()} == {"2", "3"}
        with full:
            await desk.engine.load("m", "4")


async def test_stopping_answers_what_waits_and_refuses_what_comes() -> None:
    async with serving(Shelf(seconds=0.02)) as desk:
        calls = [desk.ask() for _ in range(3)]
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(desk.engine.stop())
        await asyncio.sleep(0)
        late = desk.ask()
        await stopping
        assert {version_of(desk.answer(call)) for call in calls} == {"1"}
        assert "stopping" in str(desk.error(late))


# The alias


@pytest.mark.parametrize(
    "fault", [errors.NotReadyError("its files are damaged"), LookupError("no such operator")]
)
async def test_a_version_with_a_fault_is_tried_again_and_what_serves_and_the_following_go_on(
    fault: Exception,
) -> None:
    shelf = Shelf(bad={"2": fault})
    async with serving(shelf) as desk:
        shelf.aliases["champion"] = "2"
        await until(lambda: shelf.opened.count("2") >= 2)
        told = next(s for s in desk.engine.states() if s.version == "2")
        assert told.state == "UNAVAILABLE"
        assert str(fault) in told.reason
        assert version_of(desk.answer(await asked(desk))) == "1"
        shelf.bad.clear()
        await until(lambda: desk.engine.tracks("m")["stable"] == "2")


@pytest.mark.parametrize(("on_move", "expected"), [("swap", ("2", None)), ("offer", ("1", "2"))])
async def test_what_a_moved_alias_does_is_configured(
    on_move: Any, expected: tuple[str, Any]
) -> None:
    shelf = Shelf()
    model = ServedModel(name="m", on_move=on_move)
    async with serving(shelf, models=(model,)) as desk:
        shelf.aliases["champion"] = "2"
        await desk.engine.look()
        tracks = desk.engine.tracks("m")
        assert (tracks["stable"], tracks["candidate"]) == expected


async def test_tracks_that_a_person_set_stand_until_the_alias_moves() -> None:
    shelf = Shelf()
    async with serving(shelf) as desk:
        await desk.engine.set_tracks("m", {"stable": "3"})
        await asyncio.sleep(0.1)
        assert desk.engine.tracks("m")["stable"] == "3"
        shelf.aliases["champion"] = "2"
        await until(lambda: desk.engine.tracks("m")["stable"] == "2")


async def test_without_a_champion_or_a_registry_it_says_so_and_waits() -> None:
    def _why(desk: Desk) -> str:
        try:
            desk.engine.signature("m")
        except errors.NotReadyError as exc:
            return str(exc)
        return ""

    shelf = Shelf(aliases={}, away=True)
    async with serving(shelf) as desk:
        assert "the registry is away" in str(desk.error(await asked(desk)))
        shelf.away = False
        await until(lambda: "no version has the alias" in _why(desk))
        assert not desk.engine.is_ready()
        shelf.aliases["champion"] = "1"
        await until(lambda: desk.engine.is_ready())


async def test_the_same_version_with_new_variants_is_loaded_anew() -> None:
    shelf = Shelf()
    async with serving(shelf) as desk:
        shelf.digest = "b"
        await until(lambda: shelf.opened == ["1", "1"])
        assert version_of(desk.answer(await asked(desk))) == "1"
        assert len(desk.engine.states()) == 1
        assert desk.engine.signature("m") == SIGNATURE


async def test_an_observer_that_raises_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Witness):
        def served(self, batch: ServedBatch) -> None:
            raise LookupError("a fault of ours")

        def refused(self, call: Call, error: errors.ServingError) -> None:
            raise LookupError("a fault of ours")

    async with serving(Shelf(), witness=Broken()) as desk:
        observability = Witness()
        desk.engine.observers.append(observability)
        for _ in range(3):
            desk.answer(await asked(desk))
        desk.engine.submit(replace(made_call("r", 1.0, 1), model="x"), lambda *_: None)
        await until(lambda: observability.refusals)
        assert len(observability.batches) == 3
    assert "an observer raised" in caplog.text
