"""The argument of `python -m flows retry`; nothing of Prefect is imported to read it."""

from __future__ import annotations

from typing import Any


def add_retry_command(commands: Any) -> None:
    """Declare the command and its argument."""
    retry = commands.add_parser("retry", help="go on from where a failed or killed loop stopped")
    retry.add_argument(
        "run", nargs="?", help="its name or the beginning of its id (default: the newest bad loop)"
    )
