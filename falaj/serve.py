"""The serving process, started by hand."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="serve", help_flags=[])


@app.default
def serve(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Become `python -m serving`, which knows the commands serve, status, stop, docs, settings."""
    os.execv(sys.executable, [sys.executable, "-m", "serving", *words])
