"""Upkeep of the prediction log beside a server: a thread of its own, below all others.

Merging a day may take minutes, and rows must not wait for it. The thread has a nice value, so that
it takes what serving leaves.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from tasks.kernel.errors import FalajError
from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.parts import PartWriter
from tasks.predictions.upkeep import keep_up

logger = logging.getLogger(__name__)

NICE = 10
END_S = 2.0


class Housekeeper:
    """Sees to old days and small parts, at once and then every `upkeep_s`.

    Args:
        home: state folder.
        config: retention and merging.
    """

    def __init__(self, home: Path, config: PredictionLogConfig) -> None:
        self._home, self._config = home, config
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prediction-upkeep", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon; what is being merged is left as it was, and done by the next one."""
        self._stopping.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        with suppress(OSError):  # where it may not, it works like any other thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.is_set():
            try:
                with PartWriter(self._home) as writer:
                    keep_up(
                        self._home, writer, self._config, datetime.now(UTC), self._stopping.is_set
                    )
            except (OSError, FalajError, pa.ArrowException) as exc:  # it costs no prediction
                logger.warning("the prediction log could not be seen to: %s", exc)
            self._stopping.wait(self._config.upkeep_s)
