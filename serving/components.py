"""The components of a process that serves the registered versions of one installation.

    registry -> engine -> log, metrics, traces       online store -> entity reader
    security.yaml, or what the gateway wrote -> guard, TLS

Each component reads its section of `serving.yaml`. Who may ask is said in the state folder instead,
`serving/security.yaml`: it belongs to an installation, not to a feature repository.
"""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path

from serving.assembly import Components, ComponentsOf
from serving.config import ServingConfig
from serving.engine.engine import GAUGES, LABELS, ModelEngine
from serving.engine.loading import RegistryCatalogue
from serving.engine.queues import Limits
from serving.errors import ServingError
from serving.features.reader import FeastEntityReader
from serving.interfaces import Observer, Track
from serving.log.prediction_log import PredictionLog
from serving.observability.metrics import Source
from serving.observability.status import Observability
from serving.releases import FollowedReleases
from serving.security.guard import secured
from tasks.kernel.settings import Settings
from tasks.registry.connection import RegistryLocation


def installed_components(settings: Settings) -> ComponentsOf:
    """What makes the components of a process that serves the versions of one installation."""
    return partial(_wired, settings)


def _fields_in(
    engine: ModelEngine, entities: FeastEntityReader
) -> tuple[dict[str, set[str]], bool]:
    """Columns and entity keys of each ready model; False where some keys cannot be read now."""
    ready = [state for state in engine.states() if state.state == "READY"]
    fields: dict[str, set[str]] = {state.name: set() for state in ready}
    is_whole = bool(ready)
    for state in ready:
        inputs = engine.signature(state.name, state.version).inputs
        fields[state.name].update(name for spec in inputs for name in spec.columns)
        try:
            fields[state.name].update(entities.keys_of(state.name) or ())
        except ServingError:
            is_whole = False
    return fields, is_whole


def _wired(settings: Settings, config: ServingConfig, home: Path) -> Components:
    """All components. Nothing is opened before `start` is run, files of security apart.

    Raises:
        ConfigurationError: a file of security is not fit.
    """
    location = RegistryLocation.of(settings)
    catalogue = RegistryCatalogue(location, home, config.engine, config.models)
    limits = Limits(poll_s=config.poll_s)
    engine = ModelEngine(config.engine, config.models, catalogue, limits=limits)
    entities = FeastEntityReader(settings, config.entities, states=engine.states)
    log = PredictionLog(
        config.log, home, engine.signature, partial(_fields_in, engine, entities),
        partial(_version_in, engine),
    )  # fmt: skip
    observability = Observability(
        config.observability,
        states=engine.states,
        sources=(
            Source("engine", engine.counters, GAUGES, LABELS),
            Source("log", log.counters, frozenset({"queued_rows", "failing"})),
            Source("entities", entities.counters, frozenset({"waiting"}), entities.LABELS),
        ),
    )
    releases = FollowedReleases(engine, settings, config)
    observers: tuple[Observer, ...] = (log, *observability.observers)
    engine.observers.extend(observers)

    async def start() -> None:
        log.start()
        await engine.start()
        await releases.start()
        await entities.start()
        log.check()
        await observability.start()

    security = secured(config.security, home, config.host)
    stop, stop_log = partial(engine.stop, config.stop_s), partial(asyncio.to_thread, log.stop)
    stops = (releases.stop, stop, entities.stop, observability.stop, stop_log)
    return Components(engine, observers, security, entities, observability.pages, start, stops)


def _version_in(engine: ModelEngine, model: str, track: Track) -> str | None:
    """Version that answers a track now."""
    with suppress(ServingError):
        return engine.tracks(model).get(track)
    return None
