"""How a run speaks to the person who started it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.formatters import PrefectFormatter
from prefect.logging.handlers import PrefectConsoleHandler
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.theme import Theme

from tasks.kernel.process import PROGRESS


class OneLineFormatter(PrefectFormatter):
    """One line an event; a traceback goes to the Prefect UI, the reason to the end of the run."""

    def format(self, record: logging.LogRecord) -> str:
        """The event without its traceback."""
        shown = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        return super().format(shown).rstrip()


class WorthALine(logging.Filter):
    """Leaves out what Prefect says about its own bookkeeping."""

    NOISE = (
        "View at ",
        "Beginning flow run",
        "Beginning subflow run",
        "Encountered exception during execution",
        "Running hook ",
        "Hook '",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        """True where the event says something about the work."""
        return not record.getMessage().startswith(self.NOISE)


class Bars(logging.Handler):
    """Shows what `report_progress` tells as bars; one that is full goes away.

    Args:
        progress: the live display.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Move a bar; the first record of its name makes it."""
        name, done, total = (record.__dict__[key] for key in ("bar", "done", "total"))
        if name not in self._bars:
            self._bars[name] = self._progress.add_task("", total=total)
        text, is_open = record.getMessage(), done < total
        self._progress.update(
            self._bars[name], description=text, completed=done, total=total, visible=is_open
        )


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show bars below the lines of the log while the block lasts.

    In a terminal only, and neither with `NO_COLOR` nor where the lines are silenced: elsewhere a
    run prints its lines as ever.
    """
    handlers = logging.getLogger("prefect").handlers
    found = [each for each in handlers if isinstance(each, PrefectConsoleHandler)]
    console = found[0].console if found else None
    plain = bool(os.environ.get("NO_COLOR")) or any(each.level > logging.INFO for each in found)
    if console is None or plain or not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    # Prefect's own theme knows none of the bars' styles. Lines printed to this console stand above.
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with console.use_theme(Theme()), Progress(*columns, console=console, transient=True) as shown:
        bars = Bars(shown)
        PROGRESS.addHandler(bars)
        PROGRESS.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            PROGRESS.removeHandler(bars)
            PROGRESS.setLevel(logging.NOTSET)
