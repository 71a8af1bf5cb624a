"""Work that a server does again and again beside its answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tasks.kernel.errors import FalajError

logger = logging.getLogger(__name__)


class Repeated:
    """Work that is done every few seconds, on the event loop, from `start` to `stop`.

    A time that failed ends nothing: the next one may go well. It is logged, with its place in the
    code where the error is none of ours, and counted.

    Args:
        name: what is done, for the log.
        every_s: rest after each time, and before the first.
    """

    def __init__(self, name: str, every_s: float, work: Callable[[], Awaitable[object]]) -> None:
        self._name, self._every_s, self._work = name, every_s, work
        self._task: asyncio.Task[None] | None = None
        self.num_failed = 0

    def start(self) -> None:
        """Begin; call it on the loop."""
        self._task = asyncio.create_task(self._repeat(), name=self._name)

    async def stop(self) -> None:
        """End, also in the midst of a time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._work()
            except Exception as exc:
                self.num_failed += 1
                known = isinstance(exc, FalajError)
                level = logging.WARNING if known else logging.ERROR
                logger.log(level, "%s failed: %s", self._name, exc, exc_info=not known)
