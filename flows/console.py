"""How a run speaks to the person who started it."""

from __future__ import annotations

from prefect.logging.formatters import PrefectFormatter


class OneLineFormatter(PrefectFormatter):
    """One line an event; a traceback goes to the Prefect UI, the reason to the end of the run."""

    def formatException(self, ei: object) -> str:  # noqa: N802 (the name is logging's)
        """Leave the traceback out."""
        return ""

    def format(self, record: object) -> str:
        """The event without its traceback."""
        return super().format(record).rstrip()
