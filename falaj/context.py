"""What all commands share: where they work, what they show, windows, who decides."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter, Token

from tasks.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from tasks.contracts.base import TimeWindow
    from tasks.contracts.clock import ClockConfig
    from tasks.governance.access import Action
    from tasks.governance.identity import Subject
    from tasks.kernel.settings import Settings

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_NOT_RUNNING, EXIT_DATA = 1, 2, 3, 4
EXIT_GATE, EXIT_DRIFT, EXIT_INTERRUPTED = 5, 6, 130
MOMENT = "2013-01-01T05:00Z"
OPTIONS = Group("Options", sort_key=97)


@dataclass(frozen=True)
class Context:
    """Where a command works and how it answers, as its options or the environment say.

    Attributes:
        given: the settings; None: those of the environment, read when a command first asks, so
            that one which needs no project runs without one.
        repos: projects as `--project` named them.
        on_platform: flows run on the platform of the state folder.
        as_json: one JSON document is printed, and nothing else.
        assume_yes: nobody is asked.
        subject: what the journal says of the command beside its name; the command adds it.
    """

    given: Settings | None = None
    repos: tuple[str, ...] = ()
    on_platform: bool = False
    as_json: bool = False
    assume_yes: bool = False
    subject: dict[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def settings(self) -> Settings:
        """Where things are; what this process starts finds them there too, in whatever folder.

        Raises:
            ConfigurationError: there is no project, and no state folder is named; a restore of the
                state was cut off; or a location or database is another tenant's.
        """
        from tasks.kernel.tenants import has_tenants
        from tasks.state.contents import RESTORING

        found = self.target
        if (found.home / RESTORING).exists():
            raise ConfigurationError(
                f"the restore into {found.home} has not ended; run it again. Nothing was done"
            )
        if (found.location or found.database_url) and has_tenants(found.home):
            from tasks.metadata.identity import state_identity

            state_identity(found)  # refuses what is another tenant's
        return found

    @cached_property
    def target(self) -> Settings:
        """As `settings`, also while that state is being restored."""
        if self.given is not None:
            return self.given
        from tasks.kernel.keys.encryption import ENCRYPTION
        from tasks.kernel.settings import SERVER_FILE, USE_CASE_FILE, Settings, server_environment
        from tasks.kernel.tenants import FOLDER, TENANT
        from tasks.state.encrypted_folder import open_state

        named = Settings.from_environment({**os.environ, TENANT: ""}).home
        above = named.parents[1] if named.parent.name == FOLDER else named
        if above.name and (os.environ.get(TENANT) or above != named):
            opened: dict[str, str] = {}  # a tenant's folder lies in it, and has keys of its own
            open_state(above, opened)
            os.environ.update({n: v for n, v in opened.items() if n == "TMPDIR"})
        found = Settings.from_environment()
        open_state(found.home, os.environ)
        if server := server_environment(found.home / SERVER_FILE, os.environ):
            os.environ.update(server)
            found = Settings.from_environment()
        if os.environ.get(ENCRYPTION):
            from tasks.governance.handling import variables
            from tasks.governance.policy import require_tls

            require_tls(variables(os.environ), os.environ)
            os.environ.setdefault("PGSSLMINPROTOCOLVERSION", "TLSv1.3")  # of all PostgreSQL clients
        os.environ["FALAJ_HOME"] = str(found.home)
        if (found.feature_repo / USE_CASE_FILE).is_file():
            os.environ["FALAJ_FEATURE_REPO"] = str(found.feature_repo)
        return found

    @property
    def home(self) -> Path:
        """The state folder."""
        return self.settings.home

    def confirm(self, question: str) -> None:
        """Ask whether to do what cannot be undone.

        Raises:
            ConfigurationError: nobody can answer here, and `--yes` was not given.
            KeyboardInterrupt: the answer is no.
        """
        if self.assume_yes:
            return
        if not sys.stdin.isatty():
            raise ConfigurationError(
                f"{question} Nobody can answer at this standard input; add --yes. "
                "Nothing was changed"
            )
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise KeyboardInterrupt("not confirmed. Nothing was changed")


@dataclass(frozen=True)
class Shown:
    """What a command shows.

    Attributes:
        facts: what `--json` prints: values of contracts, dataclasses, plain data.
        lines: the same for people.
        code: the exit code.
    """

    facts: Any
    lines: Sequence[str] = ()
    code: int = 0


def show(found: Shown | Sequence[str] | int | None, *, as_json: bool) -> int:
    """Print what a command returned: lines, or one JSON document; returns its exit code."""
    if found is None or isinstance(found, int):
        return found or 0
    shown = found if isinstance(found, Shown) else Shown({"lines": list(found)}, found)
    text = "".join(f"{line}\n" for line in shown.lines)
    if as_json:
        from pydantic_core import to_json

        text = to_json(shown.facts, indent=1, inf_nan_mode="null").decode() + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()
    return shown.code


def set_environment(home: Path | None, repos: Sequence[str], level: str | None) -> None:
    """Let options replace the environment, for this process and those it starts.

    Prefect, and what else logs and colours, reads it when it is imported.
    """
    if home is not None:
        os.environ["FALAJ_HOME"] = str(home)
    if repos:
        os.environ["FALAJ_FEATURE_REPO"] = repos[0].partition("=")[0]
    if level is not None:
        for part in ("HANDLERS_CONSOLE", *(f"LOGGERS_{name}" for name in LOGGERS)):
            os.environ[f"PREFECT_LOGGING_{part}_LEVEL"] = level
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PREFECT_LOGGING_COLORS", "false")


LOGGERS = ("PREFECT_FLOW_RUNS", "PREFECT_TASK_RUNS", "TASKS", "FLOWS")


def row(name: str, text: object) -> str:
    """A line of two columns, as all commands print them."""
    return f"{name:<9} {text}"


def _moment(type_: type, tokens: list[Token]) -> datetime:
    try:
        return datetime.fromisoformat(tokens[0].value)
    except ValueError as exc:
        raise ValueError(
            f"{tokens[0].value!r} is no date and time; write it as {MOMENT}. Nothing was touched"
        ) from exc


def time_window(start: datetime, end: datetime) -> TimeWindow:
    """The window of a command line.

    Raises:
        ConfigurationError: a moment has no zone, or the window is reversed or empty.
    """
    from pydantic import ValidationError

    from tasks.contracts.base import TimeWindow

    try:
        return TimeWindow(start=start, end=end)
    except ValidationError as exc:
        raise ConfigurationError(exc.errors()[0]["msg"].removeprefix("Value error, ")) from exc


def chosen_window(
    start: datetime | None,
    end: datetime | None,
    last: timedelta | None,
    clock: ClockConfig | None = None,
    *,
    labelled: bool = False,
) -> TimeWindow | None:
    """The window of a command line: both ends, or so much up to now; None where none is named.

    Args:
        start: first moment.
        end: first moment after it.
        last: its length, up to now.
        clock: of the use case, where the window is of its data: up to the newest whole hour that
            the clock shows. None: up to this moment.
        labelled: up to the newest whole hour whose labels are known.

    Raises:
        ConfigurationError: one end is given without the other, or with a length.
    """
    ends = [moment for moment in (start, end) if moment is not None]
    if len(ends) == 1 or (ends and last is not None):
        raise ConfigurationError(
            "give both ends of the window, or --last alone, or neither. Nothing was read"
        )
    if last is None:
        return time_window(*ends) if ends else None
    now = datetime.now(UTC)
    if last <= timedelta():
        raise ConfigurationError("--last is no length of time; write it as 7d or 24h")
    return clock.newest(now, last, labelled=labelled) if clock else time_window(now - last, now)


def required_window(window: TimeWindow | None, command: str) -> TimeWindow:
    """A window that a command cannot do without.

    Raises:
        ConfigurationError: none is named.
    """
    if window is None:
        raise ConfigurationError(
            f"name the window: falaj {command} START END, or --last 7d. Nothing was read"
        )
    return window


def acting(
    settings: Settings, action: Action, typed: str | None, break_glass: str | None = None
) -> Subject:
    """Who gives this command, after it was seen that they may; see `duties.acting`."""
    from tasks.governance import duties

    try:
        use_case = settings.use_case
    except ConfigurationError:  # without a project, it is a thing of the whole installation
        use_case = None
    return duties.acting(settings.home, action, use_case, typed, break_glass)


def recorded_act(
    settings: Settings, action: str, person: Subject, said: str, **subject: str
) -> AbstractContextManager[dict[str, Any]]:
    """What a person does to a model: a line of the journal when the block ends."""
    from tasks.governance.duties import who
    from tasks.governance.journal import Journal

    journal = Journal(settings.home / "audit")
    return journal.recorded(action, said=said, subject=subject, who=who(person))


Here = Annotated[Context, Parameter(parse=False)]
Moment = Annotated[datetime, Parameter(converter=_moment)]
Start = Annotated[Moment, Parameter(help=f"First moment of the window, such as {MOMENT}.")]
End = Annotated[Moment, Parameter(help="First moment after the window.")]
Last = Annotated[timedelta, Parameter(help="The newest so long instead, such as 7d or 24h.")]
Approver = Annotated[
    str | None,
    Parameter(help="Who decides, for the record (default: who is signed in, or the user)."),
]
BreakGlass = Annotated[
    str | None,
    Parameter(name="--break-glass", help="Why an admin does what the duties forbid; all see it."),
]
Comment = Annotated[str, Parameter(help="Why, for the record.")]
DryRun = Annotated[
    bool,
    Parameter(name="--dry-run", help="Show what it would do; change nothing.", show_default=False),
]
