"""Claims of one machine that ask, hold, give back and die at random."""

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.control.config import LeaseRequest
from tasks.control.leases.repository import Lease, LeaseRepository
from tests.support.platform.lease_devices import host
from tests.support.suite.examples import examples

CORES, GPUS = 4, 2
MOST_CLAIMS = 12
REQUESTS = st.one_of(
    st.builds(LeaseRequest, cores=st.integers(1, CORES)),
    st.builds(LeaseRequest, cores=st.integers(0, 2), gpus=st.integers(1, GPUS)),
)


class LeasesOfOneHost(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="falaj-leases-")
        self.repository = LeaseRepository(Path(self.folder.name))
        self.devices = host(cores=CORES, gpus=GPUS)
        self.claims: list[Lease] = []

    def teardown(self) -> None:
        for own in self.claims:
            own.release()
        self.folder.cleanup()

    @property
    def line(self) -> list[Lease]:
        return [own for own in self.claims if own.claim.grant is None]

    @property
    def holders(self) -> list[Lease]:
        return [own for own in self.claims if own.claim.grant is not None]

    @precondition(lambda self: len(self.claims) < MOST_CLAIMS)
    @rule(request=REQUESTS, priority=st.integers(1, 4))
    def ask(self, request: LeaseRequest, priority: int) -> None:
        self.claims.append(self.repository.ask(request, "somebody", self.devices, priority))

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        own = data.draw(st.sampled_from(self.line))
        own.look()
        if own.claim.grant is not None:
            self.check_nobody_was_passed_by(own)

    def check_nobody_was_passed_by(self, taker: Lease) -> None:
        """The oracle of the order: who came before, and wants of the same, still has its share."""
        cores = CORES - sum(own.claim.request.cores for own in self.holders)
        gpus = GPUS - sum(own.claim.request.gpus for own in self.holders)
        for other in self.line:
            if other.claim.order < taker.claim.order:
                wanted, taken = other.claim.request, taker.claim.request
                assert not (wanted.cores and taken.cores) or cores >= wanted.cores
                assert not (wanted.gpus and taken.gpus) or gpus >= wanted.gpus

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        own = data.draw(st.sampled_from(self.claims))
        own.release()
        self.claims.remove(own)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """What the kernel does of a process that is killed."""
        own = data.draw(st.sampled_from(self.claims))
        os.close(own._descriptor)
        own._descriptor = -1
        self.claims.remove(own)

    @invariant()
    def no_device_is_held_by_two_and_all_have_what_they_asked_for(self) -> None:
        cores, gpus = list[int](), list[str]()
        for own in self.holders:
            assert len(own.claim.grant.cores) == own.claim.request.cores
            assert len(own.claim.grant.gpus) == own.claim.request.gpus
            cores += own.claim.grant.cores
            gpus += own.claim.grant.gpus
        assert len(cores) == len(set(cores))
        assert len(gpus) == len(set(gpus))

    @invariant()
    def the_dead_are_forgotten(self) -> None:
        found = {claim.lease_id for claim in self.repository.claims()}
        assert found == {own.claim.lease_id for own in self.claims}

    @rule()
    def everybody_is_served_in_the_end(self) -> None:
        """Holders give back: the line empties, whatever is in it."""
        for _ in range(len(self.claims) + 1):
            for own in self.holders:
                own.release()
                self.claims.remove(own)
            for own in sorted(self.line, key=lambda each: each.claim.order):
                own.look()
        assert not self.line


TestLeasesOfOneHost = LeasesOfOneHost.TestCase
TestLeasesOfOneHost.settings = settings(examples(15), stateful_step_count=25)
