"""What traffic is to look like in each step, and after the end."""

from __future__ import annotations

from tasks.release.config import StepConfig
from tasks.release.records import OPEN, RELEASED, Release, Shares, Wanted


def shares_of(step: StepConfig, *, sticky: bool) -> Shares:
    """How the edge shares requests in a step."""
    return Shares(candidate=step.candidate_percent, mirror=step.mirror_percent, sticky=sticky)


def wanted_traffic(release: Release) -> Wanted:
    """What servers and edge are to do for a release as it stands.

    The candidate stays loaded in its slot from the first step on, so that a step is a change at the
    edge alone. Where nothing splits requests, it takes the slot `stable`.
    """
    if release.state == RELEASED:
        return Wanted(stable=release.candidate)
    if release.state != OPEN:
        return Wanted(stable=release.stable)
    if not release.can_split:
        return Wanted(stable=release.candidate)
    step = release.current
    return Wanted(
        stable=release.stable,
        candidate=release.candidate,
        shadow=release.candidate if step.mirror_percent else None,
        shares=shares_of(step, sticky=release.config.sticky),
    )
