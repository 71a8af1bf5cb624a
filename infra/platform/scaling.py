"""How many serving processes and workers there are to be: one rule, decided from numbers alone.

Who acts on it: the supervisor on this machine, and in a cluster the manifests that
`manifests` makes of the same rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import yaml
from jinja2 import Template
from pydantic import Field, model_validator

from tasks.kernel.settings import PROJECT_ROOT
from tasks.kernel.values import Contract

TOLERANCE = 0.1
"""Use that is so near to what is wanted changes nothing; Kubernetes has the same."""
TEMPLATE = PROJECT_ROOT / "infra" / "work_pools" / "kubernetes" / "scaling.yaml.j2"


class ScalingRule(Contract):
    """Bounds and goals of one group: the serving processes, or the workers of a pool."""

    least: int = Field(default=1, ge=0, description="0: none while there is nothing to do.")
    most: int = Field(default=1, ge=1, description="Never more, whatever waits.")
    load_each: float = Field(default=4.0, gt=0, description="Runs or waiting requests for each.")
    busy: float = Field(default=0.7, gt=0, le=1, description="Share of a core that each may use.")
    latency_ms: float | None = Field(default=None, gt=0, description="99 % within; None: any.")
    price_per_hour: float = Field(default=0.0, ge=0, description="Of each.")
    budget_per_hour: float | None = Field(default=None, gt=0, description="Of all; None: any.")
    cool_down_s: float = Field(
        default=300.0, ge=0, le=3600, description="Fewer when fewer have been enough for so long."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.least > self.affordable:
            raise ValueError(f"least={self.least} is above what most and budget allow")
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
        busy: mean share of a core that each uses; None where it is not known.
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
class Decision:
    """How many there are to be, and why.

    Attributes:
        needed: what the load alone asks for; to be remembered for `cool_down_s`.
    """

    count: int
    reason: str
    needed: int


def decide(rule: ScalingRule, load: Load, recent: Sequence[int]) -> Decision:
    """How many of a group there are to be.

    More at once, when those that start have come; fewer where fewer have been enough all the time.

    Args:
        rule: bounds and goals.
        load: as seen now.
        recent: `needed` of the decisions of the last `cool_down_s` seconds; before so long has
            passed, what there was at the beginning is among them.
    """
    by_load = math.ceil(load.waiting / rule.load_each - 1e-9)
    needs = [(by_load, f"{load.waiting:g} wait or run, {rule.load_each:g} for each")]
    if load.busy is not None and load.ready:
        use = load.busy / rule.busy
        count = load.ready if abs(use - 1) <= TOLERANCE else math.ceil(load.ready * use - 1e-9)
        needs.append((count, f"each uses {load.busy:.0%} of a core, {rule.busy:.0%} wanted"))
    latency_ms, goal_ms = load.latency_ms or 0.0, rule.latency_ms or math.inf
    # More processes do not make an idle one faster.
    if latency_ms > goal_ms and (load.busy is None or load.busy > rule.busy / 2):
        needs.append((load.count + 1, f"99 % in {latency_ms:.0f} ms, {goal_ms:g} ms wanted"))
    asked, reason = max(needs, key=lambda need: need[0])
    needed = count = max(rule.least, min(asked, rule.affordable))
    if asked > needed:
        reason += f"; bound or budget allow {rule.affordable}"
    if needed > load.count > load.ready:
        count, reason = load.count, f"{load.count - load.ready} still start; {reason}"
    elif needed < load.count:
        kept = max([needed, *recent])
        count = load.count if load.is_held else min(load.count, kept)
        if count > needed:
            reason = f"{needed} may do, {'a run is in progress' if load.is_held else reason}"
    return Decision(count, reason, needed)


def manifests(rules: Mapping[str, ScalingRule], namespace: str) -> list[dict[str, Any]]:
    """The rules for a cluster: Kubernetes scales `serving` by CPU, KEDA each pool by its runs."""
    text = Template(TEMPLATE.read_text(encoding="utf-8")).render(rules=rules, namespace=namespace)
    return [one for one in yaml.safe_load_all(text) if one]
