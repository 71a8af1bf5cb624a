"""A machine of made-up clocks and real processes that ask, hold, fall silent and die at random."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.placement import HELD, Claim, Grant, LeaseTerms
from tasks.control.leases.repository import LeaseRepository
from tasks.kernel.process import ProcessName, start_of
from tests.support.platform.lease_devices import host
from tests.support.suite.examples import examples

TERMS = LeaseTerms(ttl_s=60, grace_s=10, ageing_s=100)
CORES, GPUS = 4, 2
MOST_ACTORS = 12
REQUESTS = st.one_of(
    st.builds(LeaseRequest, cores=st.integers(1, CORES)),
    st.builds(
        LeaseRequest,
        cores=st.integers(0, 2),
        gpus=st.integers(1, GPUS),
    ),
)


@dataclass
class Actor:
    """Somebody with a process of its own, and what it believes."""

    process: subprocess.Popen[bytes]
    name: ProcessName
    claim: Claim
    deadline_s: float
    is_alive: bool = True
    is_silent: bool = False

    @property
    def holds(self) -> bool:
        return self.claim.state == HELD

    @property
    def grant(self) -> Grant:
        assert self.claim.grant is not None
        return self.claim.grant


class LeasesOfOneHost(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="falaj-leases-")
        self.now_s = 0.0
        self.me = ProcessName.of_this()
        self.asking = self.me
        self.repository = LeaseRepository(
            f"sqlite:///{Path(self.folder.name) / 'operation' / 'operation.db'}",
            TERMS,
            who=lambda: self.asking,
            clock=lambda: self.now_s,
        )
        self.devices = host(cores=CORES, gpus=GPUS)
        self.actors: list[Actor] = []
        self.tokens: list[int] = []

    def teardown(self) -> None:
        for actor in self.actors:
            actor.process.kill()
            actor.process.wait()
        self.folder.cleanup()

    @property
    def believers(self) -> list[Actor]:
        """Who works on devices: alive, and not told that the lease is lost."""
        return [a for a in self.actors if a.is_alive and a.holds and self.now_s < a.deadline_s]

    @property
    def line(self) -> list[Actor]:
        return [a for a in self.actors if a.is_alive and not a.holds]

    @precondition(lambda self: len(self.actors) < MOST_ACTORS)
    @rule(several=st.lists(st.tuples(REQUESTS, st.integers(1, 4)), min_size=1, max_size=6))
    def ask(self, several: list[tuple[LeaseRequest, int]]) -> None:
        for request, priority in several:
            self.ask_once(request, priority)

    def ask_once(self, request: LeaseRequest, priority: int) -> None:
        process = subprocess.Popen(["sleep", "600"])
        start = start_of(process.pid)
        assert start is not None
        name = self.me.model_copy(update={"pid": process.pid, "start": start})
        self.asking = name
        claim = self.repository.ask(request, f"actor {process.pid}", self.devices, priority)
        actor = Actor(process, name, claim, self.now_s + 60)
        self.actors.append(actor)
        self.see_what_was_given()
        if actor.holds:
            self.note_grant(actor)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """As one who waits does: take the devices if it is one's turn."""
        self.poll(data.draw(st.sampled_from(self.line)))

    def poll(self, actor: Actor) -> None:
        if actor.is_silent:
            return
        outlook = self.repository.outlook(actor.claim)
        if outlook.mine is None:  # it had been silent for too long
            self.forget(actor)
        elif outlook.is_my_turn:
            self.repository.serve(actor.claim)
            self.see_what_was_given()
            assert actor.holds

    def see_what_was_given(self) -> None:
        """Those in line see what any change has given them."""
        for actor in sorted(self.line, key=lambda each: each.claim.order):
            mine = self.repository.outlook(actor.claim).mine
            if mine is not None and mine.state == HELD:
                actor.claim = mine
                self.note_grant(actor)

    def note_grant(self, actor: Actor) -> None:
        token = actor.claim.token
        assert token is not None
        assert token not in self.tokens
        self.tokens.append(token)
        self.check_nobody_was_passed_by(actor)

    def check_nobody_was_passed_by(self, taker: Actor) -> None:
        """The oracle of the order: who came before, and wants of the same, still has its share."""
        for other in self.line:
            if other.claim.order > taker.claim.order or self.is_written_off(other):
                continue
            wanted, taken = other.claim.request, taker.claim.request
            if wanted.cores and taken.cores:
                assert self.free_cores() >= wanted.cores, "cores were taken past one before"
            if wanted.gpus and taken.gpus:
                assert self.free_gpus() >= wanted.gpus, "a GPU was taken past one before"

    def is_written_off(self, actor: Actor) -> bool:
        return actor.is_silent and self.now_s > actor.deadline_s + TERMS.grace_s

    def held(self) -> list[Actor]:
        """Everybody whose devices are not to be given on."""
        return [
            a
            for a in self.actors
            if a.holds and a.is_alive and self.now_s <= a.deadline_s + TERMS.grace_s
        ]

    def free_cores(self) -> int:
        return CORES - sum(a.claim.request.cores for a in self.held())

    def free_gpus(self) -> int:
        return GPUS - sum(a.claim.request.gpus for a in self.held())

    @precondition(lambda self: self.believers)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.give_back_now(data.draw(st.sampled_from(self.believers)))

    @precondition(lambda self: any(a.is_alive for a in self.actors))
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from([a for a in self.actors if a.is_alive]))
        actor.process.kill()
        actor.process.wait()
        actor.is_alive = False

    @precondition(lambda self: any(a.is_alive for a in self.actors))
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([a for a in self.actors if a.is_alive])).is_silent = True

    @rule(seconds=st.sampled_from([5.0, 14.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for actor in [a for a in self.actors if a.is_alive and not a.is_silent]:
            if actor.holds and self.now_s >= actor.deadline_s:
                continue  # it has been told, and gives no more signs
            deadline_s = self.repository.renew(actor.claim.ticket)
            if deadline_s is None:
                self.forget(actor)
            else:
                actor.deadline_s = deadline_s

    @rule()
    def sweep(self) -> None:
        believing = {a.claim.ticket for a in self.believers}
        assert not believing & {each.ticket for each in self.repository.free_ended()}
        self.see_what_was_given()
        dead = {a.claim.ticket for a in self.actors if not a.is_alive}
        left = {each.ticket for each in self.repository.facts()}
        assert not dead & left, "dead holders were freed"

    def forget(self, actor: Actor) -> None:
        actor.process.kill()
        actor.process.wait()
        self.actors.remove(actor)

    @invariant()
    def no_device_is_held_by_two(self) -> None:
        cores = [core for actor in self.believers for core in actor.grant.cores]
        assert len(cores) == len(set(cores))
        gpus = [uuid for actor in self.believers for uuid in actor.grant.gpus]
        assert len(gpus) == len(set(gpus))

    @invariant()
    def everybody_gets_what_was_asked_for(self) -> None:
        for actor in self.believers:
            assert len(actor.grant.cores) == actor.claim.request.cores
            assert len(actor.grant.gpus) == actor.claim.request.gpus

    @rule()
    def everybody_is_served_in_the_end(self) -> None:
        """Holders give back, dead ones are freed: the line empties, whatever is in it."""
        for _ in range(2 * len(self.actors) + 1):
            for actor in list(self.believers):
                self.give_back_now(actor)
            self.time_passes(TERMS.beat_s)
            for actor in sorted(self.line, key=lambda a: a.claim.order):
                self.poll(actor)
        assert not [a for a in self.line if not a.is_silent]

    def give_back_now(self, actor: Actor) -> None:
        self.repository.give_back(actor.claim.ticket)
        self.forget(actor)
        self.see_what_was_given()


TestLeasesOfOneHost = LeasesOfOneHost.TestCase
TestLeasesOfOneHost.settings = settings(examples(6), stateful_step_count=25)
