"""How far long work is, for whoever shows it; nothing is shown where nobody does."""

import logging

LOGGER = logging.getLogger("progress")


def report_progress(bar: str, done: int, total: int, text: str) -> None:
    """Tell how many of how many steps are done.

    Args:
        bar: what is counted, such as `epochs`; a bar of its own.
        done: steps that are complete.
        total: all steps; work may end before.
        text: what is being done, in a few words.
    """
    LOGGER.debug("%s", text, extra={"bar": bar, "done": done, "total": total})
