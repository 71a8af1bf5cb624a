"""How many serving processes and workers there are to be: one rule, decided from numbers alone.

Who acts on it: `infra.platform.groups` on this machine, and in a cluster the manifests of
`infra.platform.manifests`, made from the same rules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tasks.kernel.values import Contract

TOLERANCE = 0.1
"""Use that is so near to what is wanted changes nothing; Kubernetes has the same."""


class ScalingRule(Contract):
    """Bounds and goals of one group: the serving processes, or the workers of a pool."""

    least: NonNegativeInt = Field(default=1, description="0: none while there is nothing to do.")
    most: PositiveInt = Field(default=1, description="Never more, whatever waits.")
    load_each: PositiveFloat = Field(
        default=4.0, description="Runs due or in progress, or requests that wait, for each one."
    )
    busy: float = Field(
        default=0.7, gt=0, le=1, description="Use of a core by each serving process, at most."
    )
    latency_ms: PositiveFloat | None = Field(
        default=None, description="99th percentile from which serving gets one more; None: any."
    )
    price_per_hour: NonNegativeFloat = Field(default=0.0, description="Of each one.")
    budget_per_hour: PositiveFloat | None = Field(
        default=None, description="No more than this pays for, in the same currency."
    )
    cool_down_s: NonNegativeFloat = Field(
        default=300.0, description="Fewer only when fewer have been enough for so long."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.least > self.affordable:
            raise ValueError(
                f"least={self.least} is above what most={self.most} and the budget allow "
                f"({self.affordable}); lower it, or raise them"
            )
        return self

    @property
    def affordable(self) -> int:
        """The most that bound and budget allow."""
        if self.budget_per_hour is None or not self.price_per_hour:
            return self.most
        return min(self.most, int(self.budget_per_hour / self.price_per_hour + 1e-9))


@dataclass(frozen=True)
class Load:
    """What a group was seen to do.

    Attributes:
        count: that run, those included that still start.
        ready: of them, that answer.
        waiting: runs due or in progress, or requests that wait.
        busy: mean use of a core by each; None where it is not known.
        latency_ms: 99th percentile of the last minute; None where nothing was answered.
        is_held: none may be ended now, for a run would be cut off.
    """

    count: int
    ready: int
    waiting: float = 0.0
    busy: float | None = None
    latency_ms: float | None = None
    is_held: bool = False


@dataclass(frozen=True)
class Wanted:
    """How many there are to be, and why."""

    count: int
    reason: str


@dataclass(frozen=True)
class Decision:
    """What is to be done now.

    Attributes:
        needed: what the load alone asks for; to be remembered for `cool_down_s`.
    """

    count: int
    reason: str
    needed: int


def decide(rule: ScalingRule, load: Load, recent: Sequence[int]) -> Decision:
    """How many of a group there are to be.

    More at once; fewer only where fewer have been enough all the time that `recent` covers.

    Args:
        rule: bounds and goals.
        load: as seen now.
        recent: `needed` of the decisions of the last `cool_down_s` seconds; before so long has
            passed, what there was at the beginning is among them.
    """
    need = max(_needs(rule, load), key=lambda wanted: wanted.count)
    needed = max(rule.least, min(need.count, rule.affordable))
    reason = need.reason
    if need.count > rule.affordable:
        bound = "most" if rule.affordable == rule.most else "budget_per_hour"
        reason += f"; {bound} allows {rule.affordable}"
    if needed > load.count and load.ready < load.count:
        return Decision(load.count, f"{load.count - load.ready} still start; {reason}", needed)
    if needed >= load.count:
        return Decision(needed, reason, needed)
    kept = min(load.count, max([needed, *recent]))
    if load.is_held:
        return Decision(load.count, f"{needed} would do, when no run is in progress", needed)
    if kept > needed:
        reason = f"{needed} would do, for less than {rule.cool_down_s:g} s; {reason}"
    return Decision(max(kept, rule.least), reason, needed)


def _needs(rule: ScalingRule, load: Load) -> list[Wanted]:
    """What each goal asks for."""
    by_load = math.ceil(load.waiting / rule.load_each - 1e-9)
    found = [Wanted(by_load, f"{load.waiting:g} wait or run, {rule.load_each:g} for each")]
    if load.busy is not None and load.ready:
        use = load.busy / rule.busy
        count = load.ready if abs(use - 1) <= TOLERANCE else math.ceil(load.ready * use - 1e-9)
        found.append(Wanted(count, f"each uses {load.busy:.0%} of a core, {rule.busy:.0%} wanted"))
    latency_ms, goal_ms = load.latency_ms or 0.0, rule.latency_ms or math.inf
    # More processes do not make an idle one faster.
    if latency_ms > goal_ms and (load.busy is None or load.busy > rule.busy / 2):
        reason = f"99 % within {latency_ms:.0f} ms, {goal_ms:g} ms wanted"
        found.append(Wanted(load.count + 1, reason))
    return found
