"""Follows the aliases of the registry: what moves there is served, offered or told of here."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from serving.calls import Slot
from serving.engine.catalogue import Catalogue
from serving.engine.config import EngineConfig, ServedModel
from serving.engine.versions import VersionKey
from serving.errors import ServingError

if TYPE_CHECKING:
    from serving.engine.engine import ModelEngine
    from serving.engine.slots import ServedVersions

logger = logging.getLogger(__name__)


class Follower:
    """Looks at the aliases of all configured models every few seconds.

    It acts on moves alone: an alias that names something else than the stable slot does so because
    a person or a release changed the slot, and that stands until the alias moves again.

    Args:
        config: models, and how often.
        catalogue: is asked on a thread of its own; only where something changed.
        engine: takes what moved.
    """

    def __init__(self, config: EngineConfig, catalogue: Catalogue, engine: ModelEngine) -> None:
        self._config = config
        self._catalogue = catalogue
        self._engine = engine
        self._seen: dict[str, VersionKey] = {}
        self._task: asyncio.Task[None] | None = None
        self._ask_again = True

    async def start(self) -> None:
        """Look once, then go on in the background."""
        await self.look()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Look at all aliases where the registry may have changed, or a load is due again."""
        changed = await asyncio.to_thread(self._catalogue.has_changed)
        if not (changed or self._ask_again or self._is_due()):
            return
        self._ask_again = False
        for model in self._config.models:
            try:
                key = await asyncio.to_thread(self._catalogue.by_alias, model.name, model.alias)
            except ServingError as exc:
                self._ask_again = True
                self._engine.served(model.name).notes["alias"] = str(exc)
                continue
            await self._see(model, key)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            try:
                await self.look()
            except OSError as exc:
                self._ask_again = True
                logger.warning("the registry's files cannot be looked at: %s", exc)
            except Exception:
                # The next look may go well; without one no alias would be followed any more.
                self._ask_again = True
                logger.exception("the registry was not looked at")

    async def _see(self, model: ServedModel, key: VersionKey | None) -> None:
        state = self._engine.served(model.name)
        if key is None:
            state.notes["alias"] = (
                f"no version has the alias {model.alias!r}; train and promote one"
            )
            return
        state.notes.pop("alias", None)
        former = self._seen.get(model.name)
        if key == former or not self._may_try(state, key):
            return
        slot = self._slot(model, state, key, former)
        if slot is None:
            self._seen[model.name] = key
            return
        try:
            await self._engine.follow(state, key, slot)
        except ServingError as exc:
            logger.warning("%s stays as it is: %s", model.name, exc)
            return
        self._seen[model.name] = key
        logger.info("%s: %s is version %s now", model.name, slot, key.version)

    def _slot(
        self,
        model: ServedModel,
        state: ServedVersions,
        key: VersionKey,
        former: VersionKey | None,
    ) -> Slot | None:
        """The slot that is to mean what the alias names now; None where nothing is to be done."""
        slots = state.slots()
        is_first = former is None and slots["stable"] is None
        if is_first or model.on_move == "swap":
            return "stable"
        told = f"alias {model.alias!r} names version {key.version}"
        if model.on_move == "hold" or key.version == slots["stable"]:
            if key.version != slots["stable"]:
                logger.warning("%s: %s, and the configuration holds the slots", model.name, told)
            return None
        return "candidate"

    def _may_try(self, state: ServedVersions, key: VersionKey) -> bool:
        failure = state.failures.get(key.version)
        if failure is None or failure.digest != key.digest:
            return True
        return time.monotonic() >= failure.retry_at

    def _is_due(self) -> bool:
        now = time.monotonic()
        return any(
            failure.retry_at <= now
            for model in self._config.models
            for failure in self._engine.served(model.name).failures.values()
        )
