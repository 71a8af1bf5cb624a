from types import SimpleNamespace

import pytest
import torch

from tasks.training.elastic import commits as module
from tasks.training.elastic.commits import CheckedSteps, Commits, Regroup
from tasks.training.elastic.link import FromRank, Pulse
from tasks.training.strategies.base import State
from tests.support.training.thread_ranks import ThreadCommunicator, on_threads


class FakeSession:
    def __init__(self) -> None:
        self.step = 0
        self.checkpoints: list[State] = []

    def snapshot(self) -> State:
        return {"step": self.step}

    def checkpoint(self, state: State) -> None:
        self.checkpoints.append(state)


def test_all_ranks_have_rank_0s_commit_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)

    def program(ranks: ThreadCommunicator) -> tuple[int, State]:
        commits = Commits()
        for number in range(3 - ranks.rank):
            commits.keep({"w": torch.full((50,), 10.0 * number), "epoch": number, "history": [1]})
        commits.receive(ranks)
        return commits.number, commits.state()

    for number, state in on_threads(3, program):
        assert number == 3
        assert state["w"].tolist() == [20.0] * 50
        assert (state["epoch"], state["history"]) == (2, [1])


def test_what_would_have_to_be_unpickled_is_refused() -> None:
    def program(ranks: ThreadCommunicator) -> str:
        commits = Commits()
        if ranks.rank == 0:
            commits.keep({"harmful": FakeSession()})
        try:
            commits.receive(ranks)
        except Exception as exc:
            return type(exc).__name__
        return "taken"

    assert on_threads(2, program) == ["taken", "ArtifactError"]


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "COMMIT_INTERVAL_S", 0.05)


def steps_until_regroup(size: int, leave: bool) -> list[tuple[int, int, int]]:
    """Steps done, steps committed and checkpoints of each rank, where rank 1 is asked after 7."""

    def program(ranks: ThreadCommunicator) -> tuple[int, int, int]:
        sent: list[FromRank] = []
        link = SimpleNamespace(regroup_asked=False, leave_asked=False, send=sent.append)
        session, commits = FakeSession(), Commits()
        point = CheckedSteps(link, ranks, session, commits)  # type: ignore[arg-type]
        try:
            while True:
                session.step += 1
                if ranks.rank == 1 and session.step == 7:
                    link.leave_asked, link.regroup_asked = leave, not leave
                point()
        except Regroup:
            pulses = [message for message in sent if isinstance(message, Pulse)]
            assert pulses[-1].commit == commits.number
            return session.step, commits.state()["step"], len(session.checkpoints)

    return on_threads(size, program)


@pytest.mark.parametrize("leave", [False, True], ids=["regroup", "leave"])
def test_ranks_leave_the_loop_together_and_only_where_one_goes_with_a_checkpoint(
    leave: bool,
) -> None:
    ends = steps_until_regroup(3, leave)
    assert len(set(ends)) == 1
    done, committed, checkpoints = ends[0]
    assert done == committed >= 7
    assert checkpoints == leave
