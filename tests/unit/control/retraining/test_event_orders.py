"""Any order of events, kills and sweeps: one run an incident, and the same ones each time."""

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.control.retraining.decision import Cause
from tasks.control.retraining.records import Order, StartedAction
from tests.support.control import builders
from tests.support.control.controller import Controller, Runs
from tests.support.suite.examples import examples

KINDS = {
    "stale": builders.stale,
    "shifted": builders.shifted,
    "stable": builders.stable,
    "faulty": builders.faulty,
}
CAUSES = {"stale": Cause.MODEL, "shifted": Cause.CALIBRATION}


class Killed(BaseException):
    """The process is gone: nothing that follows in it is done."""


class KillingRuns(Runs):
    """Kills the process that starts a run, before or after the platform has it."""

    kill: str | None = None

    def start(self, order: Order) -> StartedAction:
        if self.kill == "before":
            raise Killed
        started = super().start(order)
        if self.kill == "after":
            raise Killed
        return started


def incidents_of(results: list[str]) -> int:
    """Oracle: in the order of the results, stretches of a cause until a stable one.

    Exact while no recalibration ends.
    """
    num_incidents, under_way = 0, set[Cause]()
    for kind in results:
        if kind == "stable":
            under_way.clear()
        elif (cause := CAUSES.get(kind)) and cause not in under_way:
            under_way.add(cause)
            num_incidents += 1
    return num_incidents


class EventOrders(RuleBasedStateMachine):
    """Results are stored in order; events of them come in any order, doubled, or never."""

    def __init__(self) -> None:
        super().__init__()
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.TemporaryDirectory(dir=in_memory)
        self.controller = Controller(f"sqlite:///{Path(self.folder.name) / 'operation.db'}")
        self.controller.runs = self.runs = KillingRuns()
        self.kinds: list[str] = []
        self.names: list[str] = []

    def teardown(self) -> None:
        self.controller.sweep()
        self.folder.cleanup()
        assert len(self.runs.by_key) == incidents_of(self.kinds)

    @rule(kind=st.sampled_from(sorted(KINDS)))
    def judge(self, kind: str) -> None:
        self.names.append(self.controller.judge(KINDS[kind](len(self.names))))
        self.kinds.append(kind)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), kill=st.sampled_from([None, "before", "after"]))
    def an_event_comes(self, data: st.DataObject, kill: str | None) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.runs.kill = kill
        try:
            self.controller.ask(name)
        except Killed:
            pass
        finally:
            self.runs.kill = None

    @rule()
    def the_sweep_comes_by(self) -> None:
        assert len(self.controller.sweep()) <= len(self.names)
        assert len(self.runs.by_key) == incidents_of(self.kinds)
        assert self.controller.sweep() == []

    # A recalibration that has ended and did not help has another incident: see test_incidents.
    @precondition(lambda self: "shifted" not in self.kinds)
    @rule()
    def runs_end(self) -> None:
        self.controller.end_runs()

    @invariant()
    def no_more_runs_than_incidents(self) -> None:
        assert len(self.runs.by_key) <= incidents_of(self.kinds)


EventOrders.TestCase.settings = settings(examples(20), stateful_step_count=12)
TestEventOrders = EventOrders.TestCase
