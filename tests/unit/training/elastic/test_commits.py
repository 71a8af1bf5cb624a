from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.training.elastic import commits as module
from tasks.training.elastic.commits import CheckedSteps, Commits, copy_of
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.messages import FromRank, Pulse
from tasks.training.elastic.session import Regroup
from tasks.training.strategies.base import State


class Board:
    """Where ranks that are threads lay down what they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.places: list[object] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadCommunicator:
    """Collectives among threads."""

    name = "threads"
    local_rank = 0
    local_size = 1

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self.rank = rank
        self.size = board.size

    def _all(self, value: object) -> list[object]:
        self._board.places[self.rank] = value
        self._board.barrier.wait()
        seen = list(self._board.places)
        self._board.barrier.wait()
        return seen

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sum(self._all(values), axis=0)

    def minimum(self, value: int) -> int:
        return min(self._all(value))

    def from_rank_0(self, value: int) -> int:
        return self._all(value)[0]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self._all(tensor.clone())[0])


class FakeLink:
    def __init__(self) -> None:
        self.regroup_asked = self.leave_asked = False
        self.sent: list[FromRank] = []

    def send(self, message: FromRank) -> None:
        self.sent.append(message)


class FakeSession:
    def __init__(self) -> None:
        self.step = 0
        self.checkpoints: list[State] = []

    def snapshot(self) -> State:
        return {"step": self.step}

    def checkpoint(self, state: State) -> None:
        self.checkpoints.append(state)


def on_ranks(size: int, program) -> list[object]:
    """What `program(exchange)` returns on each of some ranks."""
    board, results = Board(size), [None] * size

    def be(rank: int) -> None:
        results[rank] = program(ThreadCommunicator(board, rank))

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_copy_shares_nothing() -> None:
    state = {"network": {"w": torch.ones(2)}, "history": [{"epoch": 1}], "pair": (1, torch.ones(1))}
    copied = copy_of(state)
    state["network"]["w"].zero_()
    state["history"][0]["epoch"] = 2
    state["pair"][1].zero_()
    assert copied["network"]["w"].tolist() == [1, 1]
    assert copied["history"] == [{"epoch": 1}]
    assert copied["pair"][1].tolist() == [1]


def test_what_is_restored_can_be_changed_without_changing_the_commit() -> None:
    commits = Commits()
    commits.keep({"w": torch.ones(2)})
    commits.state()["w"].zero_()
    assert commits.state()["w"].tolist() == [1, 1]


def test_all_ranks_have_rank_0s_commit_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)

    def program(exchange: ThreadCommunicator) -> tuple[int, State]:
        commits = Commits()
        for number in range(3 - exchange.rank):
            commits.keep({"w": torch.full((50,), 10.0 * number), "epoch": number, "history": [1]})
        commits.receive(exchange)
        return commits.number, commits.state()

    for number, state in on_ranks(3, program):
        assert number == 3
        assert state["w"].tolist() == [20.0] * 50
        assert (state["epoch"], state["history"]) == (2, [1])


def test_what_would_have_to_be_unpickled_is_refused() -> None:
    def program(exchange: ThreadCommunicator) -> str:
        commits = Commits()
        if exchange.rank == 0:
            commits.keep({"harmful": FakeSession()})
        try:
            commits.receive(exchange)
        except Exception as exc:
            return type(exc).__name__
        return "taken"

    assert on_ranks(2, program) == ["taken", "UnpicklingError"]


def steps_until_regroup(size: int, leave: bool) -> list[tuple[int, int, int]]:
    """Steps done, steps committed and checkpoints of each rank, where rank 1 is asked after 7."""

    def program(exchange: ThreadCommunicator) -> tuple[int, int, int]:
        link, session, commits = FakeLink(), FakeSession(), Commits()
        config = ElasticConfig(check_interval_s=0.05)
        point = CheckedSteps(1, link, exchange, session, commits, config)  # type: ignore[arg-type]
        try:
            while True:
                session.step += 1
                if exchange.rank == 1 and session.step == 7:
                    link.leave_asked, link.regroup_asked = leave, not leave
                point(0.001)
        except Regroup:
            pulses = [message for message in link.sent if isinstance(message, Pulse)]
            assert pulses[-1].commit == commits.number
            return session.step, commits.state()["step"], len(session.checkpoints)

    return on_ranks(size, program)


def test_ranks_leave_the_loop_together_with_all_committed() -> None:
    ends = steps_until_regroup(3, leave=False)
    assert len(set(ends)) == 1
    done, committed, checkpoints = ends[0]
    assert done == committed >= 7
    assert checkpoints == 0


def test_a_rank_that_is_to_leave_makes_all_write_a_checkpoint_first() -> None:
    ends = steps_until_regroup(2, leave=True)
    assert len(set(ends)) == 1
    assert ends[0][2] == 1


def test_commits_of_a_slow_state_are_made_less_often() -> None:
    link, session, commits = FakeLink(), FakeSession(), Commits()
    config = ElasticConfig(commit_interval_s=0.05, check_interval_s=0.05, commit_share=0.01)
    exchange = ThreadCommunicator(Board(1), 0)
    point = CheckedSteps(1, link, exchange, session, commits, config)  # type: ignore[arg-type]
    point._commit_cost_s = 3600.0
    for _ in range(20_000):
        point(0.0)
    assert commits.number == 0
