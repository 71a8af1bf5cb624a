"""The components of a process that serves the registered versions of one installation.

    registry -> engine -> log, metrics, traces       online store -> entity reader
    security.yaml, or what the gateway wrote -> guard, TLS

Each component reads its section of `serving.yaml`. Who may ask is said in the state folder instead,
`serving/security.yaml`: it belongs to an installation, not to a feature repository.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from serving.assembly import Components, ComponentsOf
from serving.config import ServingConfig
from serving.engine.engine import GAUGES, LABELS, ModelEngine
from serving.engine.queues import Limits
from serving.errors import ServingError
from serving.features.reader import FeastEntityReader
from serving.interfaces import TRACKS, Call, Observer, ServedBatch, Track
from serving.log.prediction_log import PredictionLog
from serving.observability.metrics import Source
from serving.observability.observers import Observability
from serving.security.assembly import secured
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.settings import Settings
from tasks.registry.connection import RegistryLocation
from tasks.release.ledger import tracks_at_start

logger = logging.getLogger(__name__)


def installed_components(settings: Settings) -> ComponentsOf:
    """What makes the components of a process that serves the versions of one installation."""

    def components_of(config: ServingConfig, home: Path) -> Components:
        return _wired(settings, config, home)

    return components_of


class CheckedLog:
    """The prediction log, once it is known that each hidden field is one of a served model.

    A misspelt name would be written openly. A process may start before any model is registered, so
    this is looked at when the first batch comes, at the latest. While the keys of entities cannot
    be read, a name may be one of them: nothing is logged, and each batch asks again.
    """

    def __init__(
        self, log: PredictionLog, engine: ModelEngine, entities: FeastEntityReader
    ) -> None:
        self._log, self._engine, self._entities = log, engine, entities
        self._is_checked = self._is_wrong = False

    def look(self) -> None:
        """Check the names where a model is ready.

        Raises:
            ConfigurationError: a hidden field is unknown.
        """
        ready = [state for state in self._engine.states() if state.state == "READY"]
        if not ready:
            return
        signatures = {s.name: self._engine.signature(s.name, s.version) for s in ready}
        keys: dict[str, Iterable[str]] = {}
        away = False
        for name in signatures:
            try:
                keys[name] = self._entities.keys_of(name) or ()
            except ServingError:
                away = True
        try:
            self._log.check_names(signatures, keys)
        except ConfigurationError:
            if not away:
                raise
        else:
            self._is_checked = True

    def served(self, batch: ServedBatch) -> None:
        """See `Observer`."""
        if self._passes():
            self._log.served(batch)
        else:
            self._log.unchecked(sum(call.num_rows for call in batch.calls))

    def refused(self, call: Call, error: ServingError) -> None:
        """See `Observer`."""
        if self._passes():
            self._log.refused(call, error)
        else:
            self._log.unchecked(1)

    def _passes(self) -> bool:
        if not (self._is_checked or self._is_wrong):
            try:
                self.look()
            except ConfigurationError as exc:
                self._is_wrong = True
                logger.error("no prediction is logged: %s", exc)
        return self._is_checked


def _wired(settings: Settings, config: ServingConfig, home: Path) -> Components:
    """All components. Nothing is opened before `start` is run, files of security apart.

    Raises:
        ConfigurationError: a file of security is not fit.
    """
    engine = ModelEngine.of_registry(
        config.engine, config.models, RegistryLocation.of(settings), home,
        Limits(poll_s=config.poll_s),
    )  # fmt: skip
    log = PredictionLog(config.log, home, engine.signature, partial(_version_in, engine))
    entities = FeastEntityReader(settings, config.entities, states=engine.states)
    security = secured(config.security, home, config.host)
    tls = None if security is None else security.tls
    observability = Observability(
        config.observability,
        states=engine.states,
        sources=(
            Source("engine", engine.counters, GAUGES, LABELS),
            Source("log", log.counters, frozenset({"queued_rows", "failing"})),
            Source("entities", entities.counters, frozenset({"waiting"}), entities.LABELS),
        ),
    )
    checked = CheckedLog(log, engine, entities)
    observers: tuple[Observer, ...] = (checked, *observability.observers)
    engine.observers.extend(observers)

    async def start() -> None:
        log.start()
        await engine.start()
        await _resume_releases(engine, settings, config)
        await entities.start()
        checked.look()
        await observability.start()
        if tls is not None:
            tls.follow()

    async def stop_log() -> None:
        await asyncio.to_thread(log.stop)
        if tls is not None:
            tls.stop()

    return Components(
        engine,
        observers=observers,
        guard=None if security is None else security.guard,
        entities=entities,
        pages=observability.pages,
        tls=None if tls is None else tls.context,
        grpc_credentials=None if security is None else security.grpc,
        start=start,
        stops=(partial(engine.stop, config.stop_s), entities.stop, observability.stop, stop_log),
    )


async def _resume_releases(engine: ModelEngine, settings: Settings, config: ServingConfig) -> None:
    """Begin with the tracks of an open release: the alias names its candidate already.

    Where they cannot be known or had, the alias decides, and the release's next cycle mends it.
    """
    for model in config.models:
        if model.on_move != "offer":
            continue
        try:
            champion = engine.tracks(model.name).get("stable") or ""
            tracks = await asyncio.to_thread(
                tracks_at_start, settings.metadata_url, model.name, champion
            )
            if tracks is not None:
                await _begin_with(engine, model.name, tracks)
        except (FalajError, ServingError) as exc:
            logger.error("the tracks of a release of %s are not set: %s", model.name, exc)


async def _begin_with(engine: ModelEngine, model: str, tracks: Mapping[str, str | None]) -> None:
    """Set all tracks; where the candidate cannot be had, the version before answers all the same.

    Raises:
        ServingError: that one cannot be had either.
    """
    try:
        await engine.set_tracks(model, {track: tracks.get(track) for track in TRACKS})
    except ServingError as exc:
        logger.error("%s begins with its stable version alone: %s", model, exc)
        await engine.set_tracks(model, {"stable": tracks.get("stable")})


def _version_in(engine: ModelEngine, model: str, track: Track) -> str | None:
    """Version that answers a track now."""
    with suppress(ServingError):
        return engine.tracks(model).get(track)
    return None
