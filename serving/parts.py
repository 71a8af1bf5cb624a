"""The parts of a process that serves the registered versions of one installation.

    registry -> engine -> log, metrics, traces       online store -> entity reader
    security.yaml, or what the edge wrote -> guard, TLS

Each part reads its section of `serving.yaml`. Who may ask is said in the state folder instead,
`serving/security.yaml`: it belongs to an installation, not to a feature repository.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from serving.assembly import Parts, PartsOf
from serving.calls import SLOTS, Call, ServedBatch, Slot
from serving.config import SERVING_FILE, ServingConfig, section
from serving.described import lines_of, settings_of
from serving.engine.config import EngineConfig
from serving.engine.engine import ModelEngine, Sample
from serving.errors import ServingError
from serving.features.config import EntityConfig
from serving.features.reader import FeastEntityReader
from serving.interfaces import Observer
from serving.log.prediction_log import PredictionLog
from serving.observability.config import ObservabilityConfig
from serving.observability.metrics import Source
from serving.observability.observers import Observability
from serving.security.assembly import SECURITY_FILE, SecuritySection, secured
from serving.security.config import SecurityConfig
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.settings import Settings
from tasks.predictions.config import PredictionLogConfig
from tasks.registry.connection import RegistryLocation
from tasks.release.ledger import slots_at_start

logger = logging.getLogger(__name__)
ENGINE_LABELS = {
    "refused": ("model", "slot", "reason"),
    "loaded_versions": ("model",),
    "failed_loads": ("model",),
    "passed_on": ("model",),
    **dict.fromkeys(
        ("queued_requests", "queued_rows", "spilling", "spilled"), ("model", "slot", "version")
    ),
    "missing_backends": ("model", "version"),
    **dict.fromkeys(
        ("backend_closed", "backend_opened", "backend_failures"),
        ("model", "version", "variant", "hardware"),
    ),
    **dict.fromkeys(
        ("answered", "answered_rows", "batches", "compute_seconds"),
        ("model", "version", "variant", "hardware", "slot", "fell_over_from"),
    ),
}
"""Labels of the engine's samples, in the order in which they are nested."""
ENGINE_GAUGES = frozenset(
    {
        "queued_requests_total",
        "queued_rows_total",
        "loaded_versions",
        "failed_loads",
        "queued_requests",
        "queued_rows",
        "spilling",
        "missing_backends",
        "backend_closed",
    }
)


def installed_parts(settings: Settings) -> PartsOf:
    """The parts of a process that serves registered versions of one installation."""

    def parts_of(config: ServingConfig, home: Path) -> Parts:
        return Installed(settings, config, home).parts()

    return parts_of


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
        self._is_checked = False
        self._trouble: ConfigurationError | None = None
        self._told = ""

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
        unknown = []
        for name in signatures:
            try:
                keys[name] = self._entities.keys_of(name) or ()
            except ServingError as exc:
                unknown.append(f"{name}: {exc}")
        try:
            self._log.check_names(signatures, keys)
        except ConfigurationError as exc:
            if not unknown:
                raise
            self._log_once(f"nothing is logged before entity keys are known ({unknown[0]}): {exc}")
            return
        self._is_checked = True

    def served(self, batch: ServedBatch) -> None:
        """See `Observer`."""
        if self._is_checked or self._passes():
            self._log.served(batch)
        else:
            self._log.unchecked(sum(call.num_rows for call in batch.calls))

    def refused(self, call: Call, error: ServingError) -> None:
        """See `Observer`."""
        if self._is_checked or self._passes():
            self._log.refused(call, error)
        else:
            self._log.unchecked(1)

    def _passes(self) -> bool:
        if self._trouble is None:
            try:
                self.look()
            except ConfigurationError as exc:
                self._trouble = exc
                self._log_once(f"no prediction is logged: {exc}")
        return self._is_checked

    def _log_once(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            logger.error("%s", sentence)


@dataclass
class Installed:
    """Makes the parts. Nothing is opened before their `starts` are run, files of security apart."""

    settings: Settings
    config: ServingConfig
    home: Path

    def parts(self) -> Parts:
        """All parts, wired.

        Raises:
            ConfigurationError: a section says what cannot be, or a file of security is not fit.
        """
        engine = ModelEngine.of_registry(
            self.engine_config(), RegistryLocation.of(self.settings), self.home
        )
        log = PredictionLog(
            section("log", PredictionLogConfig, self.config.log),
            self.home,
            engine.signature,
            partial(_version_in, engine),
        )
        entities = FeastEntityReader(
            self.settings,
            section("entities", EntityConfig, self.config.entities),
            states=engine.states,
        )
        security = secured(self.config.security, self.home, self.config.host)
        tls = None if security is None else security.tls
        observability = Observability(
            self.settings,
            section("observability", ObservabilityConfig, self.config.observability),
            states=engine.states,
            sources=(
                Source("engine", partial(_nested, engine.counters), ENGINE_GAUGES, ENGINE_LABELS),
                Source("log", partial(_dropped_apart, log), frozenset({"queued_rows", "failing"})),
                Source(
                    "entities",
                    entities.counters,
                    frozenset({"waiting"}),
                    {"freshness": ("view", "state"), "refused": ("reason",)},
                ),
            ),
        )
        checked = CheckedLog(log, engine, entities)
        observers: tuple[Observer, ...] = (checked, *observability.observers)
        engine.observers.extend(observers)

        async def start() -> None:
            log.start()
            await engine.start()
            await self._go_on_with_releases(engine)
            await entities.start()
            checked.look()
            await observability.start()
            if tls is not None:
                tls.follow()

        async def stop_log() -> None:
            await asyncio.to_thread(log.stop)

        async def stop_engine() -> None:
            await engine.stop(self.config.stop_s)

        async def stop_tls() -> None:
            if tls is not None:
                tls.stop()

        return Parts(
            engine,
            observers=observers,
            guard=None if security is None else security.guard,
            entities=entities,
            pages=observability.pages,
            tls=None if tls is None else tls.context,
            grpc_credentials=None if security is None else security.grpc,
            starts=(start,),
            stops=(stop_engine, entities.stop, observability.stop, stop_log, stop_tls),
            follows=True,
        )

    async def _go_on_with_releases(self, engine: ModelEngine) -> None:
        """Begin with the slots of an open release: the alias names its candidate already.

        Where they cannot be known or had, the alias decides, and the release's next look mends it.
        """
        for model in self.config.models:
            if model.on_move != "offer":
                continue
            try:
                champion = engine.slots(model.name).get("stable")
                slots = await asyncio.to_thread(
                    slots_at_start, self.settings.metadata_url, model.name, champion or ""
                )
                if slots is not None:
                    await _begin_with(engine, model.name, slots)
            except (FalajError, ServingError) as exc:
                logger.error("the slots of a release of %s are not set: %s", model.name, exc)

    def engine_config(self) -> EngineConfig:
        """The engine's section, with what the whole configuration says where it says nothing."""
        config = self.config
        told = {
            "models": [m.model_dump() for m in config.models],
            "hardware": [{"name": config.hardware, "hardware_class": config.hardware}],
            "placement": {"latency_goal_ms": min((m.goal_ms for m in config.models), default=50)},
            "poll_s": config.poll_s,
        }
        return section("engine", EngineConfig, {**told, **config.engine})


def all_settings() -> list[str]:
    """Every setting of serving, by the file in which it stands."""
    sections: dict[str, type[BaseModel]] = {
        "engine": EngineConfig,
        "log": PredictionLogConfig,
        "entities": EntityConfig,
        "security": SecuritySection,
        "observability": ObservabilityConfig,
    }
    return [
        *lines_of(
            f"{SERVING_FILE}, in the feature repository", settings_of(ServingConfig, sections)
        ),
        *lines_of(f"{SECURITY_FILE}, in the state folder", settings_of(SecurityConfig, {})),
    ]


async def _begin_with(engine: ModelEngine, model: str, slots: Mapping[str, str | None]) -> None:
    """Set all slots; where the candidate cannot be had, the version before answers all the same.

    Raises:
        ServingError: that one cannot be had either.
    """
    try:
        await engine.set_slots(model, {slot: slots.get(slot) for slot in SLOTS})
    except ServingError as exc:
        logger.error("%s begins with its stable version alone: %s", model, exc)
        await engine.set_slots(model, {"stable": slots.get("stable")})


def _version_in(engine: ModelEngine, model: str, slot: Slot) -> str | None:
    """Version that answers a slot now."""
    with suppress(ServingError):
        return engine.slots(model).get(slot)
    return None


def _nested(counters: Any) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    samples: Iterable[Sample] = counters()
    for sample in samples:
        keys = [sample.name, *(sample.labels[name] for name in ENGINE_LABELS.get(sample.name, ()))]
        place = found
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = place.get(keys[-1], 0) + sample.value
    return found


def _dropped_apart(log: PredictionLog) -> Mapping[str, Any]:
    found: dict[str, Any] = {"dropped_rows": {}}
    for name, number in log.counters().items():
        name, _, reason = name.partition(":")
        if reason:
            found[name][reason] = number
        else:
            found[name] = number
    return found
