"""Importing Feast without what only writers of definitions need."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def import_feast() -> None:
    """Import Feast lean, for a process that only reads; does nothing where it is imported already.

    The type checks that typeguard adds to Feast's classes compile each of them again: 4.7 of 6.2 s
    of CPU. They are for whoever writes definitions; here these come from a registry. PyTorch, which
    Feast takes where it is there, is 150 MB more for a process that stays. Whatever needs PyTorch
    or typeguard later has them whole.
    """
    if "feast" in sys.modules:
        return
    import typeguard

    checked, torch = typeguard.typechecked, sys.modules.get("torch")
    typeguard.typechecked = _unchecked  # type: ignore[assignment]
    if torch is None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        importlib.import_module("feast")
    finally:
        typeguard.typechecked = checked
        if torch is None:
            del sys.modules["torch"]


def _unchecked(target: Any) -> Any:
    """As `typeguard.typechecked`, without checks."""
    return target
