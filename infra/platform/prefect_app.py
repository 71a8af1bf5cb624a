"""Prefect's own application, with two things mended that no setting of it mends.

A request that found SQLite busy is repeated before it is refused, and an idle server rests longer.

Prefect begins its transactions as readers. Where another one has written before such a transaction
does, SQLite refuses at once ("database is locked"), however long it may wait, and Prefect answers
503: ask again. Its own clients do. A browser does not, so that a click on Submit, Cancel or Resume
had no effect and said nothing. The transaction was rolled back, so asking again is safe.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

from asyncpg import PostgresError
from sqlalchemy.exc import SQLAlchemyError

BUSY = 503
DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0)
"""Before each repetition; about six seconds in all, then the refusal is passed on."""

LOOK_EVERY = timedelta(seconds=1)

MAX_BODY_BYTES = 2_000_000
"""A longer request is passed on as it comes, and not repeated. Parameters of a run may have 512
KiB."""


class RepeatBusy:
    """Repeats a request that was answered 503, as Prefect's own clients do.

    Args:
        app: the ASGI application behind it.
        delays_s: seconds before each repetition, each lengthened by chance up to twice.
    """

    def __init__(self, app: Any, delays_s: tuple[float, ...] = DELAYS_S) -> None:
        self._app, self._delays_s = app, delays_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on; HTTP requests that change something are kept, to be asked again."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        messages = await _read(receive)
        is_whole = messages[-1]["type"] == "http.request" and not messages[-1].get("more_body")
        for delay_s in self._delays_s if is_whole else ():
            answer = _Answer(send)
            try:
                # On a copy: routing writes into it which part of the path has been consumed.
                await self._app(dict(scope), _again(messages, receive), answer.send)
            except (SQLAlchemyError, PostgresError):  # raised once more after the answer
                if not answer.is_busy:
                    raise
            if not answer.is_busy:
                return
            await asyncio.sleep(delay_s * (1 + random.random()))
        await self._app(scope, _again(messages, receive), send)


class _Answer:
    """Lets an answer through, but for one that says that the database was busy."""

    def __init__(self, send: Any) -> None:
        self._send, self.is_busy = send, False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.is_busy = message["status"] == BUSY
        if not self.is_busy:
            await self._send(message)


async def _read(receive: Any) -> list[Any]:
    """The messages of a request up to its end, its disconnection, or the limit."""
    messages: list[Any] = []
    num_bytes = 0
    while True:
        message = await receive()
        messages.append(message)
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body") or num_bytes > MAX_BODY_BYTES:
            return messages


def _again(messages: list[Any], receive: Any) -> Any:
    """What the application receives: the messages that are kept, then what comes."""
    kept = iter(messages)

    async def following() -> Any:
        return next(kept, None) or await receive()

    return following


def rest_longer() -> None:
    """Let Prefect's background worker look at its clock each second and not four times.

    It serves loops of seconds and minutes, and looking costs a fifth of an idle server. What is
    asked of it at once still wakes it at once.
    """
    module: Any = import_module("prefect.server.api.background_workers")
    module.Worker = partial(
        module.Worker, minimum_check_interval=LOOK_EVERY, scheduling_resolution=LOOK_EVERY
    )


def create_app() -> Any:
    """Prefect's application, for uvicorn."""
    from prefect.server.api.server import create_app as prefects_own

    rest_longer()
    return RepeatBusy(prefects_own())
