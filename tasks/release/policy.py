"""From evidence to what is done: promote, hold or roll back, with the rule and the reason.

Rules in their order; the first that applies decides:

    errors        the candidate fails more often          -> roll back (the test is blind to common
                                                              faults, so nothing excuses it)
    common_fault  the stable version is in trouble too    -> hold: the feed's fault, not a version's
    split         requests are not split as asked         -> hold: the groups cannot be compared
    harm          latency, scores or task metric is worse -> roll back
    timeout       the step takes too long                 -> hold: a person decides
    held          a person holds the release              -> hold
    too_early, too_few, labels (which cannot be read), too_few_labels -> hold
    passed        nothing speaks against it               -> promote
"""

from datetime import datetime

from tasks.contracts.rollout import Action, Evidence, Finding
from tasks.release.records import Decision, Release


def decide(release: Release, evidence: Evidence, now: datetime) -> Decision:
    """What to do with an open release, from one evaluation cycle.

    Args:
        release: its step and since when.
        evidence: what was seen.
        now: this moment, UTC.
    """
    minutes = (now - release.step_since).total_seconds() / 60
    return (
        _roll_back_for([f for f in evidence.harms if f.metric == "errors"], "errors")
        or _hold_for_faults(evidence)
        or _roll_back_for([f for f in evidence.harms if f.metric != "errors"], "harm")
        or _end_for_time(release, minutes)
        or _hold_for_more(release, evidence, minutes)
        or _promote(release, evidence)
    )


def _roll_back_for(harms: list[Finding], rule: str) -> Decision | None:
    if not harms:
        return None
    reason = "; ".join(f"{f.metric.replace('_', ' ')}: {f.sentence}" for f in harms)
    return Decision(action=Action.ROLL_BACK, rule=rule, reason=reason)


def _hold_for_faults(evidence: Evidence) -> Decision | None:
    if evidence.faults:
        return _wait("common_fault", "; ".join(evidence.faults))
    if evidence.split_fault:
        return _wait("split", evidence.split_fault)
    return None


def _end_for_time(release: Release, minutes: float) -> Decision | None:
    step = release.current
    if minutes < step.max_minutes:
        return None
    return _wait(
        "timeout",
        f"step {step.name} has lasted {minutes:,.0f} minutes, {step.max_minutes:,.0f} are "
        "allowed; a person promotes it or rolls it back",
    )


def _hold_for_more(release: Release, evidence: Evidence, minutes: float) -> Decision | None:
    step = release.current
    if release.held_by:
        return _wait("held", f"{release.held_by} holds the release")
    if minutes < step.min_minutes:
        return _wait("too_early", f"{minutes:.0f} of {step.min_minutes:g} minutes are over")
    if evidence.step_requests < step.min_requests:
        return _wait(
            "too_few", f"{evidence.step_requests:,} of {step.min_requests:,} requests were answered"
        )
    if evidence.label_fault:
        return _wait("labels", f"the labels cannot be read: {evidence.label_fault}")
    if evidence.num_labels < step.min_labels:
        return _wait(
            "too_few_labels", f"{evidence.num_labels:,} of {step.min_labels:,} labels are there"
        )
    return None


def _promote(release: Release, evidence: Evidence) -> Decision:
    step = release.current
    is_last = release.step == len(release.steps) - 1
    then = "it is released" if is_last else f"next step {release.steps[release.step + 1].name}"
    return Decision(
        action=Action.PROMOTE,
        rule="passed",
        reason=f"step {step.name}: {evidence.step_requests:,} requests and "
        f"{evidence.num_labels:,} labels show no harm; {then}",
    )


def _wait(rule: str, reason: str) -> Decision:
    return Decision(action=Action.HOLD, rule=rule, reason=reason)
