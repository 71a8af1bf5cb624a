"""Groups of like children whose number changes while their supervisor runs.

A group starts what is missing, ends what is too many, and replaces its members one by one: the next
one only when all are up again, so that somebody always answers.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.platform.files import AS_CONFIGURED, GroupState, PlatformFiles, now
from infra.platform.scaling import Load, ScalingRule, decide
from infra.platform.supervisor import Child
from tasks.kernel.errors import StorageError
from tasks.kernel.files import append_lines

LOGGER = logging.getLogger(__name__)
EVALUATE_S = 10.0
FOUND_S, FOUND_LIMIT_S = 1.0, 30.0
"""A member that is up is found by the gateway no sooner, and waited for no longer."""
MOVING_S = 0.2
"""Between looks while members start, end or are replaced."""


@dataclass
class Group:
    """Like children by their numbers, from 0.

    Args:
        name: as `scaling` of the configuration names it.
        rule: how many.
        make: a child of a number.
        measure: what the group does now, from its members; None where that is not known.
        wanted: how many there are to be at first.
        are_found: whether the gateway sends requests to all members.

    Attributes:
        members: by number.
    """

    name: str
    rule: ScalingRule
    make: Callable[[int], Child]
    measure: Callable[[Sequence[Child]], Load | None]
    wanted: int
    are_found: Callable[[], bool] = lambda: True
    members: dict[int, Child] = field(default_factory=dict)
    reason: str = AS_CONFIGURED
    _ending: dict[int, Child] = field(default_factory=dict)
    _to_replace: list[int] = field(default_factory=list)
    _needed: deque[tuple[float, int]] = field(default_factory=deque)
    _evaluated: float = 0.0

    @property
    def state(self) -> GroupState:
        """What to publish."""
        return GroupState(
            name=self.name, count=len(self.members), wanted=self.wanted, reason=self.reason
        )

    @property
    def is_fixed(self) -> bool:
        """True where the rule allows one number only."""
        return self.rule.least == self.rule.affordable

    @property
    def is_moving(self) -> bool:
        """True while members are to start, to end or to be replaced."""
        return bool(self._ending or self._to_replace or len(self.members) != self.wanted)

    def replace(self) -> None:
        """Replace all members that there are now, one by one."""
        self._to_replace = [*self.members]

    def adjust(self, children: list[Child]) -> None:
        """Do what is due, by adding to the supervisor's children and taking from them."""
        for number, child in [*self._ending.items()]:
            if child.gone:
                children.remove(child)
                del self._ending[number]
        # Where there is one alone, another one answers while it is replaced.
        target = max(self.wanted, 2) if self._to_replace and self.wanted else self.wanted
        for number in range(target):
            if number not in self.members and number not in self._ending:
                self.members[number] = self.make(number)
                children.append(self.members[number])
        for number in [number for number in self.members if number >= target]:
            self._end(number)
        self._to_replace = [number for number in self._to_replace if number in self.members]
        if self._to_replace and not self._ending and self._are_settled():
            self._end(self._to_replace.pop(0))

    def _are_settled(self) -> bool:
        since = max((child.since for child in self.members.values()), default=now())
        up_s = (now() - since).total_seconds()
        if not all(child.condition == "up" for child in self.members.values()):
            return False
        return up_s > FOUND_LIMIT_S or (up_s > FOUND_S and self.are_found())

    def _end(self, number: int) -> None:
        child = self._ending[number] = self.members.pop(number)
        child.retire()

    def evaluate(self) -> bool:
        """Decide how many there are to be, where that is due; True where the number changed."""
        moment = time.monotonic()
        if self.is_fixed or moment < self._evaluated + EVALUATE_S or self._to_replace:
            return False
        if not self._evaluated:
            self._needed.append((moment, len(self.members)))
        self._evaluated = moment
        if (load := self.measure([*self.members.values()])) is None:
            return False
        while self._needed and self._needed[0][0] <= moment - self.rule.cool_down_s:
            self._needed.popleft()
        decision = decide(self.rule, load, [count for _, count in self._needed])
        self._needed.append((moment, decision.needed))
        changed = decision.count != self.wanted
        self.wanted, self.reason = decision.count, decision.reason
        return changed


@dataclass
class Groups:
    """All groups of one supervisor.

    Args:
        files: where decisions are recorded, and where a command asks for a replacement.
    """

    files: PlatformFiles
    groups: Sequence[Group]

    def adjust(self, children: list[Child]) -> float:
        """Do what is due in each group; seconds until the next look."""
        asked = self._asked()
        for group in self.groups:
            if group.name in asked:
                LOGGER.info("%s: replaced one by one", group.name)
                group.replace()
            before = len(group.members)
            if group.evaluate():
                LOGGER.info("%s: %d, were %d: %s", group.name, group.wanted, before, group.reason)
                self._record(group, before)
            group.adjust(children)
        if any(group.is_moving for group in self.groups):
            return MOVING_S
        return float("inf") if all(group.is_fixed for group in self.groups) else EVALUATE_S

    @property
    def states(self) -> tuple[GroupState, ...]:
        """What to publish."""
        return tuple(group.state for group in self.groups)

    def _asked(self) -> list[str]:
        try:
            asked = json.loads(self.files.replace.read_text())
        except FileNotFoundError:
            return []
        self.files.replace.unlink()
        return [str(name) for name in asked]

    def _record(self, group: Group, before: int) -> None:
        line = {"at": now().isoformat(), "group": group.name, "before": before}
        line |= {"count": group.wanted, "reason": group.reason}
        try:
            append_lines(self.files.log("scaling"), [json.dumps(line)])
        except (StorageError, OSError) as exc:  # a full disk must not end what runs
            LOGGER.warning("the decision is not recorded: %s", exc)
