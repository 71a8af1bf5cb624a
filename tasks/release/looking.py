"""One look at a model's release: read, compare, decide, record, act."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from tasks.kernel.errors import DataContractError
from tasks.release.acting import Releasing
from tasks.release.comparison import compare
from tasks.release.evidence import Labels, no_labels, observe
from tasks.release.policy import decide
from tasks.release.records import BY_ITSELF, Action, Decision, Evidence, Release
from tasks.release.traffic import TracksRefusedError

NOT_LOADED = "not_loaded"
LOAD_MINUTES = 10
"""After which a candidate that the server cannot load is rolled back."""


class Look(BaseModel):
    """What one look found and did."""

    model_config = ConfigDict(frozen=True)

    release: Release
    """As it is after the look."""
    decision: Decision
    evidence: Evidence | None = None
    was_repaired: bool = False
    """Traffic was not as decided, and was set again."""

    @property
    def is_change(self) -> bool:
        """Whether traffic goes elsewhere by this look."""
        return self.decision.action is not Action.HOLD


def look(releasing: Releasing, release: Release, labels: Labels, home: Path, now: datetime) -> Look:
    """Look at an open release once, and do what the evidence says.

    Args:
        releasing: ledger, traffic and registry.
        release: an open one.
        labels: asked only where something is compared.
        home: state folder with the prediction log.
        now: this moment, UTC.

    Raises:
        TransientError: the server, the edge, the registry or the database did not answer; what
            was decided stays decided, and the next look carries it out.
    """
    release = releasing.ledger.release(release.release_id)  # a try before may have decided
    if not release.is_moved:
        try:
            release = releasing.settle(release)
        except TracksRefusedError as exc:
            return _not_loaded(releasing, release, exc, now)
        return _kept(release, "what was decided before is carried out now")
    if not release.is_open:
        ended = f"{release.title} has ended"
        return Look(
            release=release, decision=Decision(action=Action.HOLD, rule="closed", reason=ended)
        )
    champion = releasing.champions.champion(release.model)
    if champion != release.candidate:
        reason = f"the champion is {champion or 'nobody'} by now; traffic stays with the stable one"
        gone = Decision(action=Action.SUPERSEDE, rule="superseded", reason=reason)
        decided = releasing.ledger.decide(release, gone, BY_ITSELF)
        return Look(release=releasing.settle(decided), decision=gone)
    try:
        repaired = releasing.keep(release)
    except TracksRefusedError as exc:
        return _not_loaded(releasing, release, exc, now)
    known, fault = _known_labels(labels, release, now)
    evidence = compare(observe(home, release, known, now), release)
    evidence = evidence.model_copy(update={"label_fault": fault})
    decision = decide(release, evidence, now)
    decided = releasing.ledger.decide(release, decision, BY_ITSELF, evidence)
    if not decided.is_moved:
        decided = releasing.settle(decided)
    return Look(release=decided, decision=decision, evidence=evidence, was_repaired=repaired)


def _known_labels(labels: Labels, release: Release, now: datetime) -> tuple[pd.DataFrame, str]:
    """The labels, or none and why: failures are to end a release though a table is damaged."""
    try:
        return labels.of_release(release, now), ""
    except DataContractError as exc:
        return no_labels(), str(exc)


def _not_loaded(
    releasing: Releasing, release: Release, exc: TracksRefusedError, now: datetime
) -> Look:
    """Roll back where the server has refused for long enough; the record says since when.

    Raises:
        TracksRefusedError: it may come yet, or the release has ended.
    """
    newest = releasing.ledger.entries(release.release_id)[-1]
    if not release.is_open:
        raise exc
    if newest.rule != NOT_LOADED:
        releasing.ledger.note(release, NOT_LOADED, str(exc))
        raise exc
    if now - newest.at < timedelta(minutes=LOAD_MINUTES):
        raise exc
    reason = f"the candidate cannot be loaded: {exc}"
    decision = Decision(action=Action.ROLL_BACK, rule=NOT_LOADED, reason=reason)
    decided = releasing.ledger.decide(release, decision, BY_ITSELF)
    return Look(release=releasing.settle(decided), decision=decision)


def _kept(release: Release, reason: str) -> Look:
    return Look(
        release=release,
        decision=Decision(action=Action.HOLD, rule="unfinished", reason=reason),
        was_repaired=True,
    )
