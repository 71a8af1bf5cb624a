"""Two backends of a version: the second one answers where the first one fails, until it is back."""

import asyncio

import pytest

from serving.config import HardwareConfig
from serving.engine import dispatch
from serving.engine.versions import Times
from serving.errors import BackendError, NotReadyError
from tests.support.serving.standins import TWO_KINDS, Shelf, asked, held, serving, until, version_of

pytestmark = pytest.mark.anyio


def test_times_are_learned_and_larger_batches_are_guessed_from_smaller_ones() -> None:
    times = Times()
    assert times.expected_ms(5) == 0.0
    times.note(4, 1.0)
    assert (times.expected_ms(7), times.expected_ms(1), times.expected_ms(32)) == (1.0, 1.0, 8.0)
    for _ in range(40):
        times.note(5, 3.0)
    assert times.expected_ms(4) == pytest.approx(3.0, abs=0.01)


async def test_a_batch_whose_backend_dies_is_answered_by_the_other_and_both_ways() -> None:
    shelf = Shelf(hardware=("cpu", "gpu"))
    async with serving(shelf, hardware=TWO_KINDS) as desk:
        cpu, gpu = (shelf.behaviours["1", name] for name in ("cpu", "gpu"))
        cpu.broken = True
        calls = [desk.ask(float(n)) for n in range(3)]
        await desk.settled()
        for n, call in enumerate(calls):
            answer = desk.answer(call)
            assert answer.outputs["score"].tolist() == [1000 + 2 * n]
            assert (answer.served.hardware, answer.served.fell_over_from) == ("gpu", "cpu")
        assert desk.engine.is_ready("m")
        counters, on_cpu = desk.engine.counters(), ("m", "1", "cpu-fp32", "cpu")
        assert counters["backend_closed"][on_cpu] == 0
        assert counters["backend_failures"][on_cpu] == 1

        gpu.broken = True
        both = desk.ask()
        await desk.settled()
        assert isinstance(desk.error(both), BackendError | NotReadyError)
        assert "the device is gone" in str(desk.error(both))
        await until(lambda: not desk.engine.is_ready("m"))
        (state,) = desk.engine.states()
        assert (state.state, "cpu: the device is gone" in state.reason) == ("UNAVAILABLE", True)
        now = await asked(desk)
        assert isinstance(desk.error(now), NotReadyError)
        assert desk.error(now).retry_after_s is not None

        cpu.broken = gpu.broken = False
        version = desk.engine.served("m").versions["1"]
        await until(lambda: all(one.circuit.closed for one in version.backends))
        served = desk.answer(await asked(desk)).served
        assert (served.hardware, served.fell_over_from) == ("cpu", "")


async def test_a_batch_that_does_not_come_back_is_computed_elsewhere() -> None:
    shelf = Shelf(hardware=("cpu", "gpu"), seconds=0.005)
    async with serving(shelf, hardware=TWO_KINDS, batch_s=0.1) as desk:
        cpu = shelf.behaviours["1", "cpu"]
        cpu.gate.clear()
        first, second = desk.ask(1.0), desk.ask(2.0)
        await desk.settled()
        for call, score in ((first, 1002), (second, 1004)):
            answer = desk.answer(call)
            assert answer.outputs["score"].tolist() == [score]
            assert (answer.served.hardware, answer.served.fell_over_from) == ("gpu", "cpu")
        version = desk.engine.served("m").versions["1"]
        assert "no answer within 0.1 s" in version.backends[0].circuit.reason
        cpu.gate.set()
        await until(lambda: version.backends[0].circuit.closed)
        assert desk.answer(await asked(desk)).served.hardware == "cpu"
        assert len(desk.outcomes[first.request_id]) == 1


async def test_where_no_thread_is_to_be_had_calls_are_refused_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(Shelf(seconds=0.005)) as desk:
        await asked(desk)
        version = desk.engine.served("m").versions["1"]
        backend = version.backends[0]
        backend.times.note(1, 1e4)  # long: a thread is to compute it

        def none(*_: object) -> int:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(dispatch._thread, "start_new_thread", none)
            for _ in range(2):
                call = await asked(desk)
                assert isinstance(desk.error(call), BackendError | NotReadyError)
                assert "can't start new thread" in str(desk.error(call))
            former = backend.circuit.retry_at
            await until(lambda: backend.circuit.retry_at > former)  # asked in vain, and goes on
        await until(lambda: backend.circuit.closed)
        assert desk.answer(await asked(desk)).served.hardware == "cpu"
        assert (backend.busy, version.uses) == (False, 0)


async def test_no_more_batches_run_beside_each_other_than_there_are_threads() -> None:
    shelf = Shelf(seconds=0.01)
    async with serving(shelf, hardware=(HardwareConfig(workers=1),)) as desk:
        await desk.engine.set_tracks("m", {"candidate": "2"})
        await held(desk)
        other = desk.ask(track="candidate")
        await asyncio.sleep(0.03)
        assert shelf.behaviours["2", "cpu"].sizes == []
        await desk.finish()
        assert version_of(desk.answer(other)) == "2"
