"""A release from its beginning to its end: begin, evaluate, decide, move traffic and alias.

What was decided is carried out in this order: traffic, the alias, the note that it is done.
Everything here can be done again: a process killed anywhere leaves a release whose traffic is not
as decided, and whoever comes next, an evaluation cycle or a person, brings it there.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

import pandas as pd

from tasks.contracts.rollout import Action, Evidence
from tasks.kernel.errors import DataContractError, RegistryError, SignatureError
from tasks.kernel.values import Frozen
from tasks.release.comparison import compare
from tasks.release.config import ReleaseConfig
from tasks.release.evidence import RequestLog, no_labels, observe
from tasks.release.ledger import ReleaseLedger
from tasks.release.policy import decide
from tasks.release.records import BY_HAND, BY_ITSELF, ROLLED_BACK, ByHand, Decision, Release, Wanted
from tasks.release.traffic import TracksRefusedError, Traffic, set_traffic

logger = logging.getLogger(__name__)
NOT_LOADED = "not_loaded"
LOAD_MINUTES = 10
"""After which a candidate that the server cannot load is rolled back."""


class Cycle(Frozen):
    """What one evaluation cycle found and did."""

    release: Release
    """As it is afterwards."""
    decision: Decision
    evidence: Evidence | None = None
    was_repaired: bool = False
    """Traffic was not as decided, and was set again."""

    @property
    def is_change(self) -> bool:
        """Whether this cycle sends traffic elsewhere."""
        return self.decision.action is not Action.HOLD


class Champions(Protocol):
    """The registry's side: which version the alias `champion` names."""

    def champion(self, model: str) -> str | None:
        """Number of the champion; None where there is none."""

    def was_restored(self, model: str) -> bool:
        """Whether a roll back, and no promotion, made the champion what it is."""

    def take_back(self, release: Release, reason: str) -> str:
        """Point the alias at the champion before; returns its number. Repeating changes nothing.

        Raises:
            RegistryError: the one before cannot serve. The alias was not moved.
            TransientError: the registry was busy.
        """


@dataclass(frozen=True)
class Releasing:
    """What a release is carried out with."""

    ledger: ReleaseLedger
    traffic: Traffic
    champions: Champions

    def begin(self, model: str, config: ReleaseConfig, actor: str, comment: str = "") -> Release:
        """Release the champion: from what the server's track `stable` holds now.

        Args:
            model: registered model.
            config: its steps and bounds.
            actor: who begins it.
            comment: why, where a person says so.

        Raises:
            DataContractError: there is no champion, it serves already, or another release is open.
            TransientError: the server does not answer; the release is open and begins later.
        """
        self.finish(model)
        champion = self.champions.champion(model)
        if champion is None:
            raise DataContractError(
                f"{model} has no champion, so there is nothing to release; promote a version first"
            )
        stable = self.traffic.tracks(model).get("stable")
        if stable is None:
            raise DataContractError(
                f"the server has no version of {model} in track `stable`, so nothing can be "
                "compared; it begins with the champion by itself"
            )
        release = self.ledger.open(
            model,
            stable,
            champion,
            config,
            actor,
            can_split=self.traffic.can_split,
            reason=comment or "a new champion",
        )
        return self.settle(release)

    def due(self, model: str, config: ReleaseConfig) -> bool:
        """Whether a release of the champion is to begin by itself.

        One that was rolled back does not begin again: a person may start it.
        """
        moved = self._moved_alias(model) if config.enabled else None
        if moved is None:
            return False
        last = self.ledger.last_of_candidate(model, moved[1])
        return last is None or last.state != ROLLED_BACK

    def _moved_alias(self, model: str) -> tuple[str, str] | None:
        """The version that serves and the champion; None if they are one or a release is open."""
        if self.ledger.open_release(model) is not None:
            return None
        champion = self.champions.champion(model)
        stable = self.traffic.tracks(model).get("stable")
        return None if champion is None or stable in (None, champion) else (str(stable), champion)

    def follow_roll_back(self, model: str) -> str | None:
        """Where the alias was taken back after a release, all traffic goes there at once.

        The controller does so, for one. That version served before, so nothing is to be learned
        about it in steps.

        Returns:
            The version that traffic went to; None where nothing was to be done.
        """
        moved = self._moved_alias(model) if self.champions.was_restored(model) else None
        if moved is None:
            return None
        stable, champion = moved
        set_traffic(self.traffic, model, Wanted(stable=champion))
        last = self.ledger.last_release(model)
        if last is not None:
            reason = f"the alias went back to version {champion}, and all traffic with it"
            self.ledger.note(last, "alias_restored", reason)
        logger.warning("%s: all traffic goes back from version %s to %s", model, stable, champion)
        return champion

    def finish(self, model: str) -> None:
        """Carry out what is left of a decision whose process was killed."""
        last = self.ledger.last_release(model)
        if last is not None and not last.is_moved:
            self.settle(last)

    def settle(self, release: Release) -> Release:
        """Bring traffic and alias to what the release wants, until nothing else is wanted."""
        while True:
            self._move(release)
            is_newest = self.ledger.mark_moved(release)
            release = self.ledger.release(release.release_id)
            if is_newest:
                return release

    def evaluate(self, release: Release, log: RequestLog, now: datetime) -> Cycle:
        """Compare the versions of an open release once, and do what the evidence says.

        Args:
            release: an open one.
            log: asked only where something is compared.
            now: this moment, UTC.

        Raises:
            TransientError: the server, the gateway, the registry or the database did not answer;
                what was decided stays decided, and the next cycle carries it out.
        """
        release = self.ledger.release(release.release_id)  # a try before may have decided
        if release.is_moved and not release.is_open:
            return _held(release, "closed", f"{release.title} has ended")
        is_left = not release.is_moved
        if not is_left and self.champions.champion(release.model) != release.candidate:
            reason = "another version is the champion by now; traffic stays with the stable one"
            gone = Decision(action=Action.SUPERSEDE, rule="superseded", reason=reason)
            return self._decided(release, gone)
        try:
            if is_left:
                reason = "what was decided before is carried out now"
                return _held(self.settle(release), "unfinished", reason, was_repaired=True)
            # A server that was restarted begins with the champion in its track `stable`.
            repaired = set_traffic(self.traffic, release.model, release.wanted)
        except TracksRefusedError as exc:
            return self._not_loaded(release, exc, now)
        until = now - timedelta(seconds=release.config.settle_s)
        labels, fault = _known_labels(log, release, now)
        evidence = compare(observe(log.rows(release, until), release, labels, until), release)
        evidence = evidence.model_copy(update={"label_fault": fault})
        cycle = self._decided(release, decide(release, evidence, now), evidence)
        return cycle.model_copy(update={"was_repaired": repaired})

    def _decided(
        self, release: Release, decision: Decision, evidence: Evidence | None = None
    ) -> Cycle:
        decided = self.ledger.decide(release, decision, BY_ITSELF, evidence)
        if not decided.is_moved:
            decided = self.settle(decided)
        return Cycle(release=decided, decision=decision, evidence=evidence)

    def _not_loaded(self, release: Release, exc: TracksRefusedError, now: datetime) -> Cycle:
        """Roll back where the server has refused for long enough; the record says since when.

        Raises:
            TracksRefusedError: it may come yet, or the release has ended.
        """
        newest = self.ledger.entries(release.release_id)[-1]
        is_first = newest.rule != NOT_LOADED
        if release.is_open and is_first:
            self.ledger.note(release, NOT_LOADED, str(exc))
        if not release.is_open or is_first or now - newest.at < timedelta(minutes=LOAD_MINUTES):
            raise exc
        reason = f"the candidate cannot be loaded: {exc}"
        back = Decision(action=Action.ROLL_BACK, rule=NOT_LOADED, reason=reason)
        return self._decided(release, back)

    def act_by_hand(
        self, model: str, action: ByHand, actor: str, comment: str, seen: Release | None = None
    ) -> Release:
        """Record what a person wants with the open release of a model, and do it.

        Args:
            model: registered model.
            action: what is wanted.
            actor: who wants it.
            comment: why.
            seen: the release as it was when it was wanted. A second try, after one that recorded it
                and did not come to its end, then brings that to its end and goes no further step.

        Raises:
            DataContractError: none is open, it changed in the same moment, or the name is empty.
            TransientError: what was recorded is carried out by the next evaluation cycle.
        """
        check_name(actor)
        wanted = Action(action)
        if seen is not None and _was_recorded(self.ledger, seen, wanted, actor):
            return self.settle(self.ledger.release(seen.release_id))
        release = self.ledger.open_release(model)
        if release is None or wanted is not Action.ROLL_BACK:  # it waits for nothing that may fail
            self.finish(model)
            release = self.ledger.open_release(model)
        if release is None:
            raise DataContractError(f"no release of {model} is open; nothing was changed")
        reason = f"{actor}: {comment}" if comment else actor
        decision = Decision(action=wanted, rule=BY_HAND, reason=reason)
        decided = self.ledger.decide(release, decision, actor)
        changes = wanted in (Action.PROMOTE, Action.ROLL_BACK)
        holder = {Action.HOLD: actor, Action.RESUME: ""}.get(wanted, decided.held_by)
        if decided.generation != release.generation + changes or decided.held_by != holder:
            raise DataContractError(
                f"{decided.title} was changed by another one in the same moment; nothing was done. "
                "Read it again"
            )
        return decided if decided.is_moved else self.settle(decided)

    def _move(self, release: Release) -> None:
        wanted = release.wanted
        if release.state == ROLLED_BACK:
            # Requests leave the candidate before anything that could fail is asked for.
            if self.traffic.can_split:
                self.traffic.set_shares(release.model, wanted.shares)
            else:
                set_traffic(self.traffic, release.model, wanted)
            self._take_back(release)
        set_traffic(self.traffic, release.model, wanted)

    def _take_back(self, release: Release) -> None:
        """Move the alias back; where the registry refuses, the record says so and traffic stays."""
        if self.champions.champion(release.model) != release.candidate:
            return  # done before, or another version was promoted since
        entries = self.ledger.entries(release.release_id)
        reason = next(
            (e.reason for e in reversed(entries) if e.action is Action.ROLL_BACK), "rolled back"
        )
        try:
            self.champions.take_back(release, f"release {release.release_id[:12]}: {reason}")
        except (RegistryError, SignatureError) as exc:
            logger.error(
                "%s: the alias stays at version %s: %s", release.title, release.candidate, exc
            )
            self.ledger.note(release, "alias_refused", str(exc))


def _held(release: Release, rule: str, reason: str, *, was_repaired: bool = False) -> Cycle:
    decision = Decision(action=Action.HOLD, rule=rule, reason=reason)
    return Cycle(release=release, decision=decision, was_repaired=was_repaired)


def _known_labels(log: RequestLog, release: Release, now: datetime) -> tuple[pd.DataFrame, str]:
    """The labels, or none and why: failures are to end a release though a table is damaged."""
    try:
        return log.labels(release, now), ""
    except DataContractError as exc:
        return no_labels(), str(exc)


def _was_recorded(ledger: ReleaseLedger, seen: Release, action: Action, actor: str) -> bool:
    """Whether a step or an end was recorded for this person, of the release as it was seen."""
    if action not in (Action.PROMOTE, Action.ROLL_BACK):
        return False
    return any(
        (entry.action, entry.rule, entry.actor, entry.generation)
        == (action, BY_HAND, actor, seen.generation)
        for entry in ledger.entries(seen.release_id)
    )


def check_name(actor: str) -> None:
    """Refuse what is no name.

    Raises:
        DataContractError: it is empty, or cannot be shown.
    """
    if not actor.strip() or not actor.isprintable():
        raise DataContractError(
            f"{actor!r} is no name; a release is changed under the name of who does it. Nothing "
            "was changed"
        )
