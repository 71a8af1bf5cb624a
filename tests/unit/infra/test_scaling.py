"""How many there are to be, how a group follows, and what a cluster gets of the same rules."""

from dataclasses import dataclass, field
from datetime import timedelta

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.platform import supervisor
from infra.platform.config import PlatformConfig
from infra.platform.files import now
from infra.platform.scaling import Load, ScalingRule, decide, manifests
from infra.platform.supervisor import Child, Group

BETWEEN = ScalingRule(least=1, most=8, latency_ms=50)
BATCH = ScalingRule(least=0, most=3, load_each=2)


@pytest.mark.parametrize(
    ("rule", "load", "recent", "count", "said"),
    [
        (BATCH, Load(0, 0), (), 0, "0 wait"),
        (BATCH, Load(0, 0, waiting=1), (), 1, "1 wait or run, 2 for each"),
        (BATCH, Load(1, 1, waiting=5), (), 3, "5 wait"),
        (BATCH, Load(1, 1, waiting=50), (), 3, "allow 3"),
        (BATCH, Load(3, 1, waiting=50), (), 3, "50 wait"),
        (BATCH, Load(2, 1, waiting=50), (), 2, "1 still start"),
        (BATCH, Load(2, 2), (2, 0), 2, "0 may do"),
        (BATCH, Load(2, 2), (1, 0), 1, "0 may do"),
        (BATCH, Load(2, 2), (0, 0), 0, "0 wait"),
        (BATCH, Load(2, 2, waiting=1, is_held=True), (), 2, "a run is in progress"),
        (BETWEEN, Load(2, 2, busy=0.72), (), 2, "each uses 72%"),
        (BETWEEN, Load(2, 2, busy=0.95), (), 3, "each uses 95%"),
        (BETWEEN, Load(4, 4, busy=0.1), (), 1, "each uses 10%"),
        (BETWEEN, Load(2, 2, busy=0.6, latency_ms=80), (), 3, "99 % in 80 ms"),
        (BETWEEN, Load(2, 2, busy=0.1, latency_ms=80), (2,), 2, "1 may do"),
        (BETWEEN, Load(2, 2, busy=0.6, latency_ms=40), (), 2, "each uses 60%"),
    ],
)
def test_the_load_says_how_many(
    rule: ScalingRule, load: Load, recent: tuple[int, ...], count: int, said: str
) -> None:
    decision = decide(rule, load, recent)
    assert decision.count == count
    assert said in decision.reason


def test_no_more_than_the_budget_pays_for() -> None:
    rule = ScalingRule(least=1, most=10, load_each=1, price_per_hour=0.3, budget_per_hour=0.9)
    assert decide(rule, Load(1, 1, waiting=9), ()).count == rule.affordable == 3
    with pytest.raises(ValidationError, match="budget"):
        ScalingRule(least=4, most=10, price_per_hour=0.3, budget_per_hour=0.9)


@given(
    count=st.integers(0, 9),
    waiting=st.integers(0, 100),
    busy=st.none() | st.floats(0, 4),
    latency_ms=st.none() | st.floats(0, 500),
    recent=st.lists(st.integers(1, 8)),
)
def test_it_never_leaves_its_bounds_and_never_takes_what_was_needed_a_moment_ago(
    count: int, waiting: int, busy: float | None, latency_ms: float | None, recent: list[int]
) -> None:
    decision = decide(BETWEEN, Load(count, count, waiting, busy, latency_ms), recent)
    assert 1 <= decision.count <= max(8, count)
    assert decision.count >= min(count, max(recent, default=0))
    more = decide(BETWEEN, Load(count, count, waiting + 9, busy, latency_ms), recent)
    assert more.count >= decision.count


def test_serving_is_never_scaled_to_nothing() -> None:
    with pytest.raises(ValidationError, match="least is 0"):
        PlatformConfig(scaling={"serving": ScalingRule(least=0)})


@dataclass
class FakeChild:
    """A child that is up, and gone as soon as it was told to end, if not `slow`."""

    number: int
    condition: str = "up"
    slow: bool = False
    since = now() - timedelta(minutes=1)
    is_retired: bool = False

    def retire(self) -> None:
        self.is_retired = True

    @property
    def gone(self) -> bool:
        return self.is_retired and not self.slow


@dataclass
class Scene:
    """A group of such children, and those that its supervisor knows."""

    load: Load | None = None
    slow: bool = False
    """Children start and end when `finish` is called, not at once."""
    made: list[int] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    def group(self, rule: ScalingRule) -> Group:
        return Group(rule, self.make, lambda members: self.load)

    def make(self, number: int) -> Child:
        self.made.append(number)
        child = FakeChild(number, "starting" if self.slow else "up", self.slow)
        return child  # type: ignore[return-value]

    def finish(self) -> None:
        """What starts is up, what was told to end is gone."""
        for child in self.children:
            child.condition, child.slow = "up", not child.is_retired  # type: ignore[attr-defined]

    def live(self) -> list[int]:
        return [child.number for child in self.children if not child.is_retired]  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_are_replaced_one_by_one_and_one_always_answers(count: int) -> None:
    scene = Scene(slow=True)
    group = scene.group(ScalingRule(least=count, most=count))
    group.adjust("serving", scene.children)
    scene.finish()
    assert scene.live() == [*range(count)]
    before = [*scene.children]
    group.to_replace = [*group.members]
    for turn in range(60):
        group.adjust("serving", scene.children)
        answering = [c for c in scene.children if c.condition == "up" and not c.is_retired]
        assert len(answering) >= max(1, count - 1), turn
        if turn % 4 == 3:
            scene.finish()
    assert scene.live() == [*range(count)]
    assert not set(map(id, before)) & set(map(id, scene.children))


def test_the_next_one_waits_until_the_one_before_is_up_and_found() -> None:
    scene, found = Scene(), [False]
    group = scene.group(ScalingRule(least=2, most=2))
    group.are_found = lambda: found[0]
    group.adjust("serving", scene.children)
    group.to_replace = [0, 1]
    starting: FakeChild = scene.children[1]  # type: ignore[assignment]
    for child in scene.children:
        child.since = now() - timedelta(seconds=5)
    starting.condition = "starting"
    group.adjust("serving", scene.children)
    starting.condition = "up"
    group.adjust("serving", scene.children)
    assert scene.live() == [0, 1]
    found[0] = True
    group.adjust("serving", scene.children)
    assert scene.live() == [1]


def test_it_follows_the_load_down_to_none_and_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "EVALUATE_S", 0.0)
    scene = Scene(Load(0, 0, waiting=5))
    group = scene.group(BATCH.model_copy(update={"cool_down_s": 0.0}))
    assert scene.live() == []
    group.adjust("cpu", scene.children)
    assert scene.live() == [0, 1, 2]
    scene.load = None
    group.adjust("cpu", scene.children)
    assert scene.live() == [0, 1, 2]
    scene.load = Load(3, 3)
    for child in scene.children:
        child.slow = True  # type: ignore[attr-defined]
    group.adjust("cpu", scene.children)
    assert scene.live() == []
    assert len(scene.children) == 3
    scene.load = Load(0, 0, waiting=1)
    group.adjust("cpu", scene.children)
    assert scene.live() == [], "a number is free when its process has ended"


def test_a_cluster_gets_the_same_rules() -> None:
    found = manifests({"serving": BETWEEN, "cpu": BATCH}, "falaj")
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found) == 3
    kubernetes_validate.validate(by_kind["HorizontalPodAutoscaler"], "1.30", strict=True)
    spec = by_kind["ScaledObject"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 3)
    (trigger,) = spec["triggers"]
    names = by_kind["TriggerAuthentication"]["metadata"]["name"]
    assert trigger["authenticationRef"] == {"name": names}
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert not manifests({}, "falaj")
