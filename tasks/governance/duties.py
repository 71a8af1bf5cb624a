"""Segregation of duties: who trained does not approve, and some acts need two people.

ISO/IEC 27001:2022, A.5.3. Where the machine's user is the one owner, no duty binds.

Breaking the glass lets an admin do what the duties forbid: it is possible, loud and written down.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from tasks.governance.access import Action, Asked, access_table
from tasks.governance.identity import Subject, current_subject, read_sign_in
from tasks.governance.journal import Journal, process_identity
from tasks.kernel.errors import AccessError

LOGGER = logging.getLogger(__name__)
AGREE, AGREED, BROKEN = "agree", "agreed", "break-glass"
AGREES_FOR, SHOWN_FOR = timedelta(hours=24), timedelta(days=30)
LONGEST_REASON = 1000


def acting(
    home: Path,
    action: Action,
    use_case: str | None,
    typed: str | None = None,
    break_glass: str | None = None,
) -> Subject:
    """Who gives a command, after it was seen that they may.

    Args:
        home: the state folder.
        action: of the table of roles.
        use_case: whose thing it is done to; None: the installation's.
        typed: a name that the owner gives; refused where people sign in.
        break_glass: why an admin does what the duties forbid.

    Raises:
        AccessError: they may not, are not signed in, or a name was typed where people sign in.
        TransientError: the issuer does not answer.
    """
    subject, config = current_subject(home), read_sign_in(home)
    if config is None:
        return replace(subject, name=(typed or "").strip() or subject.name)
    if typed is not None:
        raise AccessError(
            f"{typed!r} was typed as who decides, and people sign in here: {subject.name} does. "
            "Leave --approver out. Nothing was changed"
        )
    wanted: Action = "administer" if break_glass is not None else action
    if reason := access_table().refusal(subject, Asked("commands", wanted, use_case), config):
        facts = {"reason": reason, "service": "commands", "use_case": use_case}
        Journal(home / "audit").append("refuse", outcome="refused", who=who(subject), **facts)
        raise AccessError(f"{subject.name} may not {wanted}: {reason}. Nothing was changed")
    return subject if break_glass is None else _unbound(home, subject, action, break_glass.strip())


def _unbound(home: Path, subject: Subject, action: Action, reason: str) -> Subject:
    if not 0 < len(reason) <= LONGEST_REASON:
        raise AccessError(
            f"--break-glass has {len(reason)} characters; expected a reason of 1 to "
            f"{LONGEST_REASON}. Nothing was changed"
        )
    Journal(home / "audit").append(BROKEN, said=reason, acts=action, who=who(subject))
    LOGGER.warning("%s broke the glass to %s: %s", subject.name, action, reason)
    return replace(subject, is_bound=False)


def broken_glass(home: Path, until: datetime | None = None) -> list[str]:
    """Who broke the glass in 30 days, when and why: a sentence each, as the journal has them.

    Args:
        home: the state folder.
        until: the end of the days; None: now.
    """
    until, found, journal = until or datetime.now(UTC), [], Journal(home / "audit")
    with journal.reading():
        for line in journal.lines():
            said = line.content if f'"{BROKEN}"'.encode() in line.text else {}
            if said.get("action") == BROKEN:
                at = datetime.fromisoformat(said["time"])
                if until - SHOWN_FOR < at <= until:
                    name, acts = said["who"]["subject"], said["acts"]
                    moment = f"{at:%Y-%m-%d %H:%M} UTC"
                    found.append(f"{name} broke the glass to {acts}, {moment}: {said['said']}")
    return found


def who(subject: Subject) -> dict[str, object]:
    """The journal's `who` of an act that somebody gave a command for."""
    named = {"subject": subject.name, "tenant": subject.tenant or None}
    return {**process_identity(), **{name: value for name, value in named.items() if value}}


def check_approver(subject: Subject, trained_by: str | None, what: str) -> None:
    """See that somebody else trained what is approved; the controller is nobody's self.

    Raises:
        AccessError: it is the same person, or nobody knows who trained it.
    """
    if subject.is_bound and trained_by in (None, subject.name):
        why = "nobody knows who trained it" if trained_by is None else f"{trained_by} trained it"
        raise AccessError(
            f"{subject.name} cannot approve {what}: {why}. Another approver can, or an admin with "
            "--break-glass REASON. Nothing was changed"
        )


def agreed_by_two(
    home: Path, subject: Subject, kind: Literal["release", "waiver"], about: Mapping[str, str]
) -> bool:
    """True where a second person agrees now, or one is enough; else the first agreement is kept.

    An agreement is a line of the journal, counts for a day, once, and for exactly this act.

    Args:
        home: the state folder.
        subject: who agrees.
        kind: of the act; `two_approvers` of sign-in.yaml names those that need two.
        about: what exactly is done.
    """
    config = read_sign_in(home)
    if config is None or not subject.is_bound or kind not in config.two_approvers:
        return True
    journal, exactly = Journal(home / "audit"), {"kind": kind, **about}
    newest = next(reversed(_agreements(journal, exactly, AGREE, AGREED)), None)
    since = datetime.now(UTC) - AGREES_FOR
    if newest and newest["action"] == AGREE and datetime.fromisoformat(newest["time"]) > since:
        first = newest["who"]["subject"]
        if first == subject.name:
            return False
        journal.append(AGREED, subject=exactly, first=first, who=who(subject))
        return True
    journal.append(AGREE, subject=exactly, who=who(subject))
    return False


def who_agreed(home: Path, kind: Literal["waiver"], about: Mapping[str, str]) -> tuple[str, ...]:
    """The two people who last agreed to exactly this act, as the journal has it; or nobody."""
    agreed = _agreements(Journal(home / "audit"), {"kind": kind, **about}, AGREED)
    return (agreed[-1]["first"], agreed[-1]["who"]["subject"]) if agreed else ()


def _agreements(journal: Journal, about: Mapping[str, str], *acts: str) -> list[dict[str, Any]]:
    """What the journal says of these acts about exactly this, the newest last."""
    lines = (line.content for line in journal.lines())
    return [said for said in lines if said.get("subject") == about and said.get("action") in acts]
