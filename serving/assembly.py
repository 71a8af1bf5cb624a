"""Puts the components of a serving process together, and runs it from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from serving.config import ServingConfig
from serving.interfaces import Observer, Pages
from serving.protocol.front import Front
from serving.protocol.http.listener import Listener, admin_listener, bound_socket, public_listener
from serving.protocol.http.pages import admin_pages, admin_token
from serving.security.guard import OpenGuard, Secured
from tasks.contracts.serving import address_file, lock_file, read_addresses
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import locked, private_folder, write_atomically
from tasks.kernel.values import is_loopback

if TYPE_CHECKING:
    import grpc.aio

    from serving.engine.engine import ModelEngine
    from serving.features.reader import FeastEntityReader

COLLECTED_AFTER = (20_000, 20, 100)
"""Objects made before the young ones are looked through, and such looks before the older ones."""
_LOOPBACK = "127.0.0.1"
Hook = Callable[[], Awaitable[None]]
_log = logging.getLogger(__name__)


async def _nothing() -> None:
    """For components that have nothing to start."""


@dataclass(frozen=True)
class Components:
    """What a serving process is put together from.

    Attributes:
        engine: loaded models; it notifies observers of what it has served and refused itself.
        observers: the engine's, for requests that are refused before the engine sees them.
        security: guard and TLS; None for `OpenGuard`, which stands on loopback only, in clear.
        entities: None where requests cannot name entities.
        pages: more pages of the admin listener, as `/metrics`.
        start: run on the event loop before anything is answered.
        stops: run one after the other after the last answer; each whatever others do.
    """

    engine: ModelEngine
    observers: Sequence[Observer] = ()
    security: Secured | None = None
    entities: FeastEntityReader | None = None
    pages: Pages = field(default_factory=dict)
    start: Hook = _nothing
    stops: Sequence[Hook] = ()


ComponentsOf = Callable[[ServingConfig, Path], Components]
"""Makes the components of a process, from its configuration and state folder, on the event loop."""


async def serve(
    config: ServingConfig,
    home: Path,
    components_of: ComponentsOf,
    number: int = 0,
    drain_s: float = 0.0,
) -> None:
    """Serve from a state folder until SIGTERM or SIGINT comes, and what is in flight is answered.

    Args:
        config: what to do.
        home: the state folder.
        components_of: makes the components.
        number: of this process, where several serve from the folder; no two have the same.
        drain_s: from the signal until connections are refused; a gateway needs so long to see that
            the process is not ready, and to send its requests elsewhere.

    Raises:
        ConfigurationError: another process serves as this replica, a port is taken, or
            a component cannot be made. Nothing was started.
    """
    announced = address_file(home, number)
    private_folder(announced.parent)
    with _only_one(announced), contextlib.ExitStack() as sockets:
        # Of a process that was killed: its number may be another program's by now.
        announced.unlink(missing_ok=True)
        http = sockets.enter_context(bound_socket(config.host, config.http.port, "HTTP"))
        admin = sockets.enter_context(
            bound_socket(_LOOPBACK, config.admin.port, "The admin interface")
        )
        token = admin_token(home)
        made = components_of(config, home)
        closed = made.security or Secured(OpenGuard(config))
        front = Front(made.engine, closed.guard, config, made.observers, made.entities)
        rpc, rpc_port = _grpc(config, front, closed)
        public = public_listener(front, closed.tls)
        inner = admin_listener(front, admin_pages(made.engine, token, made.pages))
        scheme = "http" if closed.tls is None else "https"
        addresses = {
            "http": f"{scheme}://{_address(config.host, http.getsockname()[1])}",
            "grpc": None if rpc_port is None else _address(config.host, rpc_port),
            "admin": f"http://{_address(_LOOPBACK, admin.getsockname()[1])}",
        }
        try:
            await made.start()
            listeners = [(public, public.serve(http)), (inner, inner.serve(admin))]
            await _answer(announced, drain_s, front, listeners, rpc, addresses)
        finally:
            # One after the other, and each whatever others do.
            ended = [await asyncio.gather(stop(), return_exceptions=True) for stop in made.stops]
            _raise_first([outcome for (outcome,) in ended])


def _grpc(
    config: ServingConfig, front: Front, closed: Secured
) -> tuple[grpc.aio.Server | None, int | None]:
    """The gRPC server and its port; none where it is off.

    Raises:
        ConfigurationError: it would speak in clear to others than this machine.
    """
    if not config.grpc.enabled:
        return None, None
    if closed.tls is not None and closed.grpc is None and not is_loopback(config.host):
        raise ConfigurationError(
            "HTTP has TLS here and gRPC has not, so it may be on loopback only; set "
            "grpc.enabled: false, or put Envoy before this server. Nothing was started"
        )
    from serving.protocol.grpc.service import grpc_server  # imports gRPC: after `only_tls_1_3`

    return grpc_server(front, config.host, config.grpc.port, closed.grpc)


async def _answer(
    announced: Path,
    drain_s: float,
    front: Front,
    listeners: Sequence[tuple[Listener, Awaitable[None]]],
    rpc: grpc.aio.Server | None,
    addresses: Mapping[str, str | None],
) -> None:
    """Listen until a signal comes; then answer what is in flight."""
    ends = [asyncio.ensure_future(listening) for _, listening in listeners]
    try:
        if rpc is not None:
            await rpc.start()
        while not all(listener.started for listener, _ in listeners):
            await asyncio.sleep(0.01)
        _spare_what_stays()
        with _announced(announced, addresses), _signals() as signalled:
            _report(addresses, front)
            stopped = asyncio.ensure_future(signalled.wait())
            await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            front.stopping = True
        if drain_s and not any(one.done() for one in ends):
            _log.info("not ready any more; requests are answered for %g s", drain_s)
            await asyncio.wait(ends, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        _log.info("ending: what is in flight is answered within %g s", front.config.stop_s)
    finally:
        for listener, _ in listeners:
            listener.stop()
        if rpc is not None:
            ends.append(asyncio.ensure_future(rpc.stop(front.config.stop_s)))
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
    _raise_first(outcomes)


def _report(addresses: Mapping[str, str | None], front: Front) -> None:
    named = [f"{name} {address}" for name, address in addresses.items() if address]
    _log.info("serving: %s", ", ".join(named))
    if not front.engine.is_ready():
        reasons = [f"{s.name}: {s.reason}" for s in front.engine.states() if s.reason]
        missing = "; ".join(reasons) or "no model is loaded"
        _log.warning("not ready: %s. It is looked for every %g s", missing, front.config.poll_s)


@contextlib.contextmanager
def _announced(file: Path, addresses: Mapping[str, str | None]) -> Iterator[None]:
    write_atomically(file, json.dumps({"pid": os.getpid(), **addresses}) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; a second one must not cut off what is in flight."""
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, seen.set)
    try:
        yield seen
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _spare_what_stays() -> None:
    """Keep the garbage collector from what was imported and loaded: it is a million objects.

    To look through them all takes a third of a second, in which nothing is answered.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)


@contextlib.contextmanager
def _only_one(announced: Path) -> Iterator[None]:
    """Holds the lock of a replica, which ends with the process, however that ends."""

    def held() -> ConfigurationError:
        found = read_addresses(announced)
        who = f" (process {found['pid']}, {found['http']})" if found else ""
        return ConfigurationError(
            f"another process serves from {announced.parents[1]}{who}; end it first (python -m "
            "serving stop), start this one as another --replica, or name another state folder. "
            "Nothing was started"
        )

    with locked(lock_file(announced), wait_s=0, held=held):
        yield


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
