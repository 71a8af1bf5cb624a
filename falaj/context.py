"""What all commands share: the state folder, the feature repository, windows, who decides."""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token
from pydantic import ValidationError

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, WindowError
from tasks.kernel.settings import USE_CASE_FILE, Settings

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130
MOMENT = "2013-01-01T05:00Z"


@dataclass(frozen=True)
class Context:
    """Where a command works, as its options or the environment name it, or the working directory.

    Attributes:
        given: the settings; None: those of the environment, read when a command first asks, so
            that one which needs no project runs without one.
    """

    given: Settings | None = None
    repos: tuple[str, ...] = ()
    on_platform: bool = False

    @cached_property
    def settings(self) -> Settings:
        """Where things are; what this process starts finds them there too, in whatever folder.

        Raises:
            ConfigurationError: there is no project, and no state folder is named.
        """
        if self.given is not None:
            return self.given
        found = Settings.from_environment()
        os.environ["FALAJ_HOME"] = str(found.home)
        if (found.feature_repo / USE_CASE_FILE).is_file():
            os.environ["FALAJ_FEATURE_REPO"] = str(found.feature_repo)
        return found

    @property
    def home(self) -> Path:
        """The state folder."""
        return self.settings.home


def read_context(home: Path | None, repos: list[str], on_platform: bool) -> Context:
    """Settings of the environment; options replace it, for this process and those it starts."""
    if home is not None:
        os.environ["FALAJ_HOME"] = str(home)
    if repos:
        os.environ["FALAJ_FEATURE_REPO"] = repos[0].partition("=")[0]
    return Context(None, tuple(repos), on_platform)


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
        WindowError: a moment has no zone, or the window is reversed or empty.
    """
    try:
        return TimeWindow(start=start, end=end)
    except ValidationError as exc:
        raise WindowError(exc.errors()[0]["msg"].removeprefix("Value error, ")) from exc


def optional_window(start: datetime | None, end: datetime | None) -> TimeWindow | None:
    """As `time_window`; None where neither end is given.

    Raises:
        ConfigurationError: one end is given without the other.
    """
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise ConfigurationError("give both ends of the window, or neither. Nothing was read")
    return time_window(start, end)


def in_utc(moment: datetime) -> datetime:
    """A moment without a zone is one of UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def recorded_act(
    settings: Settings, action: str, person: str, said: str, **subject: str
) -> AbstractContextManager[dict[str, Any]]:
    """What a person does to a model: a line of the audit trail when the block ends."""
    from tasks.features.access.audit import AuditTrail, process_identity

    who = {**process_identity(), "subject": person}
    return AuditTrail(settings.home / "audit").recorded(action, said=said, subject=subject, who=who)


Here = Annotated[Context, Parameter(parse=False)]
Moment = Annotated[datetime, Parameter(converter=_moment)]
Start = Annotated[Moment, Parameter(help=f"First moment of the window, such as {MOMENT}.")]
End = Annotated[Moment, Parameter(help="First moment after the window.")]
Approver = Annotated[str, Parameter(help="Who decides, for the record.")]
Comment = Annotated[str, Parameter(help="Why, for the record.")]
AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
