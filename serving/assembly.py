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
from serving.interfaces import Guard, Observer, Pages
from serving.protocol.front import Front
from serving.protocol.http.listener import Listener, admin_listener, bound_socket, public_listener
from serving.protocol.http.pages import admin_pages, admin_token
from serving.security.guard import OpenGuard
from serving.security.tls import RenewingTls
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import is_held, locked, private_folder, write_atomically

if TYPE_CHECKING:
    import grpc
    import grpc.aio

    from serving.engine.engine import ModelEngine
    from serving.features.reader import FeastEntityReader

SERVING_FOLDER = Path("serving")
ADDRESS_FILE = SERVING_FOLDER / "server.json"
_LOCK_FILE = SERVING_FOLDER / "server.lock"
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
        guard: None for `OpenGuard`, which stands on loopback only.
        entities: None where requests cannot name entities.
        pages: more pages of the admin listener, as `/metrics`.
        tls: of the public HTTP listener; None for plain HTTP.
        grpc_credentials: of the gRPC listener; None for no TLS, which with `tls` is for loopback
            alone.
        start: run on the event loop before anything is answered.
        stops: run one after the other after the last answer; each whatever others do.
    """

    engine: ModelEngine
    observers: Sequence[Observer] = ()
    guard: Guard | None = None
    entities: FeastEntityReader | None = None
    pages: Pages = field(default_factory=dict)
    tls: RenewingTls | None = None
    grpc_credentials: grpc.ServerCredentials | None = None
    start: Hook = _nothing
    stops: Sequence[Hook] = ()


ComponentsOf = Callable[[ServingConfig, Path], Components]
"""Makes the components of a process, from its configuration and state folder, on the event loop."""


async def serve(config: ServingConfig, home: Path, components_of: ComponentsOf) -> None:
    """Serve from a state folder until SIGTERM or SIGINT comes, and what is in flight is answered.

    Raises:
        ConfigurationError: another process serves from this state folder, a port is taken, or
            a component cannot be made. Nothing was started.
    """
    private_folder(home / SERVING_FOLDER)
    with _only_one(home), contextlib.ExitStack() as sockets:
        # Of a process that was killed: its number may be another program's by now.
        (home / ADDRESS_FILE).unlink(missing_ok=True)
        http = sockets.enter_context(bound_socket(config.host, config.http.port, "HTTP"))
        admin = sockets.enter_context(
            bound_socket(_LOOPBACK, config.admin.port, "The admin interface")
        )
        token = admin_token(home)
        made = components_of(config, home)
        guard = made.guard or OpenGuard(config)
        front = Front(made.engine, guard, config, made.observers, made.entities)
        rpc, rpc_port = _grpc(config, front, made)
        public = public_listener(front, made.tls)
        inner = admin_listener(front, admin_pages(made.engine, token, made.pages))
        scheme = "http" if made.tls is None else "https"
        addresses = {
            "http": f"{scheme}://{_address(config.host, http.getsockname()[1])}",
            "grpc": None if rpc_port is None else _address(config.host, rpc_port),
            "admin": f"http://{_address(_LOOPBACK, admin.getsockname()[1])}",
        }
        try:
            await made.start()
            listeners = [(public, public.serve(http)), (inner, inner.serve(admin))]
            await _answer(home, front, listeners, rpc, addresses)
        finally:
            # Each, whatever others do.
            _raise_first([await _outcome(stop) for stop in made.stops])


def _grpc(
    config: ServingConfig, front: Front, made: Components
) -> tuple[grpc.aio.Server | None, int | None]:
    """The gRPC server and its port; none where it is off.

    Raises:
        ConfigurationError: it would speak in clear to others than this machine.
    """
    if not config.grpc.enabled:
        return None, None
    if made.tls is not None and made.grpc_credentials is None and not config.on_loopback:
        raise ConfigurationError(
            "HTTP has TLS here and gRPC has not, so it may be on loopback only; set "
            "grpc.enabled: false, or put Envoy before this server. Nothing was started"
        )
    from serving.protocol.grpc.service import grpc_server  # imports gRPC: after `only_tls_1_3`

    return grpc_server(front, config.host, config.grpc.port, made.grpc_credentials)


async def _answer(
    home: Path,
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
        with _announced(home, addresses), _signals() as signalled:
            _report(addresses, front)
            stopped = asyncio.ensure_future(signalled.wait())
            await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            front.stopping = True
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
def _announced(home: Path, addresses: Mapping[str, str | None]) -> Iterator[None]:
    file = home / ADDRESS_FILE
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
def _only_one(home: Path) -> Iterator[None]:
    """Holds the lock of a state folder, which ends with the process, however that ends."""

    def held() -> ConfigurationError:
        found = read_addresses(home)
        who = f" (process {found['pid']}, {found['http']})" if found else ""
        return ConfigurationError(
            f"another process serves from {home}{who}; end it first (python -m serving stop), or "
            "name another state folder. Nothing was started"
        )

    with locked(home / _LOCK_FILE, wait_s=0, held=held):
        yield


def read_addresses(home: Path) -> dict[str, str | int | None] | None:
    """What the process that serves from a state folder says of itself; None where none does."""
    try:
        found = json.loads((home / ADDRESS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_locked(home: Path) -> bool:
    """Whether a process serves from a state folder, or is about to start or to end."""
    return is_held(home / _LOCK_FILE)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _outcome(stop: Hook) -> object:
    return (await asyncio.gather(stop(), return_exceptions=True))[0]


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
