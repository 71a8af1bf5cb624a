"""Calls are refused by the time that they would wait, before anybody reads them."""

import time

import pytest

from serving.config import ServedModel
from serving.errors import OverloadedError
from tests.support.serving.standins import Desk, Shelf, held, serving

pytestmark = pytest.mark.anyio


def waiting_behind(desk: Desk, most: int = 100) -> int:
    """Calls that wait behind one that is computed, when the next one would be refused."""
    waiting = 0
    while desk.engine.refusal("m") is None and waiting < most:
        desk.ask()
        waiting += 1
    return waiting


@pytest.mark.parametrize(("goal_ms", "most"), [(50, 5), (200, 11), (1, 5)])
async def test_a_call_that_would_wait_longer_than_half_the_goal_is_refused(
    goal_ms: float, most: int
) -> None:
    """Batches of 10 ms: 25 ms would be two of them, and four may wait whatever the goal says."""

    models = (ServedModel(name="m", goal_ms=goal_ms),)
    async with serving(Shelf(seconds=0.01), models=models, batch_rows=1) as desk:
        await held(desk)
        assert waiting_behind(desk) == most
        error = desk.engine.refusal("m")
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s == pytest.approx(0.01 * most)
        refused = desk.ask()  # also where nobody asked before
        await desk.finish()
        assert isinstance(desk.error(refused), OverloadedError)


async def test_what_fits_into_the_next_batch_is_taken_however_long_the_batch_takes() -> None:
    async with serving(Shelf(seconds=0.01), batch_rows=100, requests=99) as desk:
        await held(desk)
        desk.engine.served("m").versions["1"].backends[0].times.note(200, 60_000)
        assert waiting_behind(desk, 99) == 99
        await desk.finish()


@pytest.mark.parametrize("num_rows", [1, 20])
async def test_turns_that_take_long_count_more_than_what_the_model_takes(num_rows: int) -> None:
    """The loop may be reading and refusing: then a batch comes but once a turn.

    A call of more rows than a batch has comes alone, whole, and takes one turn too.
    """

    async with serving(Shelf(seconds=0.01), batch_rows=1) as desk:
        await held(desk)
        desk.ask(rows=num_rows)
        assert (desk.engine.refusal("m") is None) == (num_rows == 1)
        queue, now = desk.engine.served("m").queues["stable"], time.monotonic()
        queue.note_taken(1, now - 0.5)
        queue.note_taken(1, now)
        error = desk.engine.refusal("m")
        assert error.retry_after_s == pytest.approx(0.5)
        await desk.finish()
