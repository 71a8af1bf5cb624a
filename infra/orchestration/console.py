"""How a run speaks to the person who started it."""

import logging

from prefect.logging.formatters import PrefectFormatter


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
