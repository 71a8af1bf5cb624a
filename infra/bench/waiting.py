"""Wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], what: str, limit_s: float = 30, pause_s: float = 0.05
) -> None:
    """Poll until `condition` holds, every `pause_s` seconds.

    Raises:
        TimeoutError: it did not within the limit.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        time.sleep(pause_s)
