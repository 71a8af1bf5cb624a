"""Fixtures that all folders share."""

from __future__ import annotations

import atexit
import os

import pytest


def _silence_exit() -> None:
    """DuckDB's binding lists "leaks" on standard error while the interpreter goes down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def pytest_configure(config: pytest.Config) -> None:
    atexit.register(_silence_exit)
