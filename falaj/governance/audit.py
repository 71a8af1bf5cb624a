"""Commands of the journal: show it, verify it; and what each command says there."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from cyclopts import App
from cyclopts.types import PositiveInt

from falaj.context import EXIT_DATA, Context, Here, Shown, acting, row
from tasks.kernel import errors
from tasks.kernel.keys.store import JOURNAL

if TYPE_CHECKING:
    from tasks.governance.journal import Journal, JournalLine

REFUSALS = (errors.ConfigurationError, errors.DataContractError, errors.PromotionRefusedError)
app = App(name="audit")


@app.default
@app.command
def show(
    *, last: PositiveInt = 20, action: str | None = None, outcome: str | None = None, context: Here
) -> Shown:
    """Show the newest lines of the journal: who did what, and what was refused.

    Args:
        last: Lines shown; with --json complete, as they are stored.
        action: Of this action only.
        outcome: Whose outcome begins so, such as refused or failed.

    Raises:
        ConfigurationError: there is no state folder.

    Examples:
        falaj audit show --last 50
        falaj audit show --outcome refused
    """
    lines = (
        line
        for line in _journal(context).lines()
        if action in (None, line.content.get("action"))
        and str(line.content.get("outcome")).startswith(outcome or "")
    )
    newest = deque(lines, last)
    shown = [_summary(line) for line in newest] or ["nothing such was recorded"]
    stored = [line.content or line.text.decode(errors="backslashreplace") for line in newest]
    return Shown({"lines": stored}, shown)


@app.command
def verify(*, accept: list[str] | None = None, context: Here) -> Shown:
    """Verify the journal: its chain, its signed head, and the heads shipped to FALAJ_AUDIT.

    Exit code 4 where it was changed, cut or forked, or is not signed by a key that is trusted.

    Args:
        accept: Name of a journal that is known to go on elsewhere, as that of a restored state.

    Raises:
        ConfigurationError: there is no state folder.
        DataContractError: all lines are gone.

    Examples:
        falaj audit verify
        falaj audit verify --accept 5f0c1b2a9d3e4f60
    """
    from tasks.governance.verification import verify as verified

    journal = _journal(context)
    found = verified(journal, accept or ())
    traces = [context.home / "feast" / "applied.json", context.home / "keyring" / JOURNAL]
    if not found.num_lines and (trace := next((each for each in traces if each.exists()), None)):
        raise errors.DataContractError(
            f"the journal in {journal.folder} is gone: {trace} is there, and what made it writes "
            "lines. Look for it in copies of the state folder; the next act begins a new one"
        )
    shipped = f"{found.num_shipped} heads; the newest {found.num_uncovered} lines are in none"
    if found.num_shipped is None:
        shipped = "none (FALAJ_AUDIT is not set): whoever may sign can make a whole journal anew"
    seen = f"{found.journal}, {found.num_lines:,} lines, head {found.head}"
    faults = [*map(str, found.faults)] or [row("Complete", "nothing was changed, cut or forked")]
    lines = [row("Journal", seen), row("Shipped", shipped), *faults]
    if found.faults:
        sys.stderr.write(f"refused: {journal.folder} is not as it was written; see the faults\n")
    return Shown(asdict(found), lines, EXIT_DATA if found.faults else 0)


@app.command
def begin(reason: str, /, *, context: Here) -> Shown:
    """Let a restored state, whose original's heads go on, go on by itself under a new name.

    Args:
        reason: Why, for the record.

    Examples:
        falaj audit begin "restored to try the upgrade"
    """
    acting(context.settings, "administer", None)
    journal = _journal(context)
    context.confirm("Let this state's journal go on by itself, beside the one it was copied from?")
    name = journal.begin(reason)
    return Shown({"journal": name}, [row("Journal", name)])


@contextmanager
def recorded_command(words: str, context: Context, *, changes: bool) -> Iterator[dict[str, Any]]:
    """Say in the journal, where the state has one, that a command begins and how it ended.

    Yields facts, to which the exit code may be added.

    Args:
        words: the command's name.
        context: adds what it worked on.
        changes: whether it changes anything; of others refusals and failures alone are recorded.
    """
    facts: dict[str, Any] = {"subject": {"command": words}}

    def say(outcome: str) -> None:
        if journal := _journal_of(context):
            facts["subject"] |= context.subject
            try:
                journal.append("command", outcome=outcome, **facts)
            except errors.StorageError as exc:
                if words not in ("prune", "down"):  # they free a full disk, recorded or not
                    raise
                sys.stderr.write(f"the journal does not say so: {exc}\n")

    if changes:
        say("begun")
    try:
        yield facts
    except BaseException as exc:
        kind = "refused" if isinstance(exc, REFUSALS) else "failed"
        with suppress(errors.FalajError):  # what went wrong first is told
            say(f"{kind}: {type(exc).__name__} {getattr(exc, 'code', '')}".strip())
        raise
    if changes and words != "migrate":  # what follows is said where the state is now
        code = facts.pop("code", None)
        say(f"exit code {code}" if code else "ok")


def _journal_of(context: Context) -> Journal | None:
    """The journal of a state that has been used; a command that only fails begins none."""
    from tasks.governance.journal import Journal
    from tasks.kernel.settings import children

    try:
        folder = context.target.home / "audit"
        return Journal(folder) if children(folder) else None
    except errors.ConfigurationError:  # there is no project and no state; or its name was wrong
        return None


def _journal(context: Context) -> Journal:
    from tasks.governance.journal import Journal

    if context.home.is_dir():
        return Journal(context.home / "audit")
    seen = f"there is no state folder {context.home}"
    raise errors.ConfigurationError(f"{seen}; name one with --home or FALAJ_HOME")


def _summary(line: JournalLine) -> str:
    """One line for people: when, what, on what, how it ended, who."""
    try:
        return _act(line.content)
    except (KeyError, TypeError, AttributeError, ValueError):  # it was spoilt
        return f"{line.file} line {line.position} is no line of a journal: {line.text[:200]!r}"


def _act(act: dict[str, Any]) -> str:
    who = act.get("who", {})
    name = who.get("subject") or who.get("user") or "nobody"
    roles = f" ({', '.join(who['roles'])})" if who.get("roles") else ""
    named = (v if isinstance(v, list) else [str(v)] for v in act.get("subject", {}).values() if v)
    subject = ", ".join(chain.from_iterable(named))
    window = act.get("window")
    span = f", {window['start']} to {window['end']}" if window else ""
    rows = f", {act['rows']:,} rows" if "rows" in act else ""
    return (
        f"{act['time'][:19]}Z {act['action']:<16}{act.get('outcome', ''):<10} {name}{roles}: "
        f"{subject or act.get('project') or act.get('reason') or ''}{span}{rows}"
    )
