"""Releases with nothing left out: registry, serving process, Envoy, log, labels, flow, kills."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flows import release as release_module
from flows.release import release_flow
from tasks.contracts.rollout import Action, Shares
from tasks.kernel.errors import TransientError
from tests.support.conversion.programs import Decided
from tests.support.host.processes import wait_until
from tests.support.release.released import FLIGHTS, LIMIT_S, Load, Whole, whole_installation
from tests.support.services.prefect_platform import PrefectApi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIRST, EQUAL, NOISE, FAILING, HOLLOW, OTHER = "123456"


class Near(Decided):
    """Answers nearly as the first version does."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for values in self.perceptron.parameters():
                values.add_(torch.randn(values.shape, generator=drawn) * 1e-4)


def _rare(numeric: Tensor) -> Tensor:
    """A quarter of what clients ask for, and next to none of the golden rows."""
    return (numeric[:, 0] > 1000) & (numeric[:, 0] < 1600) & (numeric[:, 1] > 300)


class Failing(Decided):
    """Looks something up that is not there, for some rows."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        beyond = self.bias.index_select(0, _rare(numeric).long() * 999)
        return super().forward(categorical, numeric) + 0 * beyond


class Hollow(Decided):
    """Answers what is no number, for some rows."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        nothing = torch.where(_rare(numeric), float("nan"), 0.0)
        return super().forward(categorical, numeric) + nothing


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    networks = [Decided(0), Near(1), Decided(1), Failing(0), Hollow(0), Near(2)]
    with whole_installation(tmp_path_factory.mktemp("whole"), networks) as made:
        yield made


@pytest.fixture
def before(whole: Whole) -> Iterator[str]:
    """The version that serves; whatever a test leaves open is rolled back after it."""
    yield str(whole.tracks["stable"])
    if whole.release.is_open:
        whole.command("release", "rollback", FLIGHTS, "--approver", "the next test")


def check_all_answered(load: Load, *versions: str) -> None:
    """Each request of each client was answered, and by one of these."""
    seen = Counter((one.status, one.version) for one in load.asked)
    assert set(seen) <= {(200, version) for version in versions}, seen


def test_an_equal_version_takes_over_by_itself_and_no_client_notices(
    whole: Whole, before: str, prefect_api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FALAJ_HOME", "FALAJ_FEATURE_REPO"):
        monkeypatch.setenv(name, whole.environment[name])
    monkeypatch.setattr(release_module, "CYCLE_S", 0.3)
    whole.promote(EQUAL)
    with Load(whole) as load, prefect_api.in_process():
        deadline = time.monotonic() + LIMIT_S
        assert release_flow(whole.config) is None
        begun = whole.release
        assert (begun.stable, begun.candidate) == (before, EQUAL)
        assert whole.tracks == {"stable": before, "candidate": EQUAL, "shadow": EQUAL}
        while whole.release.is_open and time.monotonic() < deadline:
            release_flow(whole.config, cycles=60)
        ended = time.time()
        load.wait_for(100)
    assert whole.release.state == "released", whole.release
    assert [period.step for period in whole.release.periods] == [0, 1, 2, 3]
    assert whole.tracks == {"stable": EQUAL, "candidate": None, "shadow": None}
    assert whole.champion == EQUAL
    assert whole.releasing.traffic.shares(FLIGHTS).candidate == 0
    check_all_answered(load, before, EQUAL)
    assert {one.version for one in load.since(ended)} == {EQUAL}
    for subject in load.subjects:  # a growing share takes clients, and gives none back
        mine = [one.version for one in load.asked if one.subject == subject]
        assert mine == sorted(mine, key=lambda version: version == EQUAL), subject


def test_a_worse_version_is_rolled_back_by_its_labels_and_so_is_the_alias(
    whole: Whole, before: str
) -> None:
    known = whole.num_loads(before)
    chances = whole.scores(before)
    whole.begin(NOISE)
    with Load(whole) as load:
        for number in range(30):
            load.wait_for(300)
            whole.label(list(load.asked), chances, seed=number)
            found = whole.evaluate()
            if not found.release.is_open:
                break
        decision = found.decision
        load.wait_for(100)
    assert (decision.action, decision.rule) == (Action.ROLL_BACK, "harm"), decision
    assert "task_paired" in {one.metric for one in found.evidence.harms}
    assert whole.champion == before
    assert whole.tracks == {"stable": before, "candidate": None, "shadow": None}
    assert whole.num_loads(before) == known, "the version before was loaded again"
    check_all_answered(load, before, NOISE)


@pytest.mark.parametrize("number", [FAILING, HOLLOW], ids=["raises", "no-number"])
def test_a_version_that_fails_for_some_requests_is_rolled_back_before_clients_meet_it(
    whole: Whole, before: str, number: str
) -> None:
    whole.begin(number)
    with Load(whole) as load:
        seen = whole.evaluate_until(step="fifth")
        load.wait_for(50)
    decision = seen[-1].decision
    assert (decision.action, decision.rule) == (Action.ROLL_BACK, "errors"), decision
    assert whole.champion == before
    assert whole.tracks == {"stable": before, "candidate": None, "shadow": None}
    check_all_answered(load, before)


def test_a_canary_survives_kills_of_envoy_and_of_the_server(whole: Whole, before: str) -> None:
    whole.begin(OTHER)
    with Load(whole) as load:
        whole.evaluate_until(step="fifth")
        tracks, shares = whole.tracks, whole.releasing.traffic.shares(FLIGHTS)
        assert shares == Shares(candidate=20, mirror=0, sticky=True)
        since = time.time()
        load.wait_for(300)
        who = load.versions_since(since)
        assert {len(versions) for versions in who.values()} == {1}

        whole.kill_server()
        wait_until(lambda: load.asked[-1].status != 200, "nobody is answered", LIMIT_S)
        whole.start_server()
        wait_until(whole.is_reached, "Envoy has found the server again", LIMIT_S)
        since = time.time()
        load.wait_for(300)
        assert whole.tracks == tracks
        again = load.versions_since(since)
        assert {s: again[s] for s in again} == {s: who[s] for s in again}

        whole.kill_edge()
        with pytest.raises(TransientError, match="shares are kept"):
            whole.evaluate_until(step="half")  # it is decided while nobody can take it
        assert (whole.release.current.name, whole.release.is_moved) == ("half", False)
        whole.start_edge()
        assert whole.evaluate().was_repaired
        assert whole.release.is_moved
        since = time.time()
        load.wait_for(300)
        grown = load.versions_since(since)
        stayed = [s for s, versions in who.items() if versions == {OTHER}]
        assert all(grown[s] == {OTHER} for s in stayed)
        assert sum(versions == {OTHER} for versions in grown.values()) > len(stayed)
        whole.evaluate_until()
        ended = time.time()
        load.wait_for(100)
    assert whole.release.state == "released", whole.release
    assert whole.tracks == {"stable": OTHER, "candidate": None, "shadow": None}
    assert {(one.status, one.version) for one in load.since(ended)} == {(200, OTHER)}
    assert {one.version for one in load.asked if one.status == 200} == {before, OTHER}


def test_a_person_takes_all_requests_back_while_they_come(whole: Whole, before: str) -> None:
    candidate = EQUAL if before != EQUAL else OTHER
    whole.begin(candidate)
    with Load(whole) as load:
        seen = whole.evaluate_until(step="all")
        assert whole.release.is_open, [(c.decision.rule, c.decision.reason) for c in seen][-3:]
        since = time.time()
        load.wait_for(100)
        assert {one.version for one in load.since(since)} == {candidate}
        known = whole.num_loads(before)
        said = whole.command("release", "rollback", FLIGHTS, "--approver", "Amal")
        ended = time.time()
        load.wait_for(200)
    assert "rolled back" in said
    assert "by Amal" in said
    assert {one.version for one in load.since(ended)} == {before}
    assert whole.champion == before
    assert whole.num_loads(before) == known
    check_all_answered(load, before, candidate)
