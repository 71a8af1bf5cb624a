"""The tracks of a serving process are those of the releases of its models, wherever it runs.

Whoever decides sets the tracks of all processes of its machine at once. What a process begins with,
and what one on another machine does, comes from the ledger, which all of them share.
"""

import asyncio
import logging
from collections.abc import Mapping

from serving.config import ServingConfig
from serving.engine.engine import ModelEngine
from serving.errors import ServingError
from serving.interfaces import TRACKS
from tasks.kernel.errors import FalajError, TransientError
from tasks.kernel.settings import Settings
from tasks.release.ledger import ReleaseLedger, tracks_at_start
from tasks.release.records import Release
from tasks.release.traffic import ServerTraffic

logger = logging.getLogger(__name__)
Tracks = Mapping[str, str | None]
Decided = tuple[str, int] | None
"""A release, and how often something was decided about it."""


class FollowedReleases:
    """Sets tracks as releases have decided; for models whose moved alias is offered to them.

    Args:
        engine: of this process.
        settings: where the ledger is.
        config: the models, and how often to look.
    """

    def __init__(self, engine: ModelEngine, settings: Settings, config: ServingConfig) -> None:
        self._engine, self._settings, self._poll_s = engine, settings, config.poll_s
        self._models = [model.name for model in config.models if model.on_move == "offer"]
        self._seen: dict[str, Decided] = {}
        self._troubles: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin with the tracks of open releases, or with those of the other processes.

        The alias names the candidate of an open release already. Where tracks cannot be known or
        had, the alias decides, and the release's next cycle corrects it.
        """
        for model in self._models:
            try:
                self._seen[model] = _decided(await self._last(model))
                champion = self._engine.tracks(model).get("stable") or ""
                tracks = await asyncio.to_thread(self._first_tracks, model, champion)
                if tracks is not None:
                    await self._set(model, tracks)
            except (FalajError, ServingError) as exc:
                logger.error("the tracks of a release of %s are not set: %s", model, exc)
        if self._models:
            self._task = asyncio.create_task(self._follow(), name="releases")

    async def stop(self) -> None:
        """Follow no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            for model in self._models:
                try:
                    # Again until nothing was decided meanwhile: the latest decision stays.
                    while await self._catch_up(model):
                        pass
                    self._troubles.pop(model, None)
                except (FalajError, ServingError) as exc:
                    if self._troubles.get(model) != str(exc):  # once, not every few seconds
                        logger.error("the tracks of %s stay as they are: %s", model, exc)
                    self._troubles[model] = str(exc)

    async def _catch_up(self, model: str) -> bool:
        """Set the tracks that were decided since the last look; False where nothing was."""
        release = await self._last(model)
        if release is None or self._seen.get(model) == _decided(release):
            return False
        self._seen[model] = _decided(release)
        await self._set(model, release.wanted.model_dump(exclude={"shares"}))
        return True

    async def _last(self, model: str) -> Release | None:
        ledger = ReleaseLedger(self._settings.metadata_url)
        return await asyncio.to_thread(ledger.last_release, model)

    def _first_tracks(self, model: str, champion: str) -> Tracks | None:
        decided = tracks_at_start(self._settings.metadata_url, model, champion)
        if decided is not None:
            return decided
        try:
            others = ServerTraffic(self._settings.home).tracks(model)
        except TransientError:  # none of them answers
            return None
        return others if others.get("stable") else None

    async def _set(self, model: str, tracks: Tracks) -> None:
        """Set all tracks; where the candidate cannot be had, the version before answers all.

        Raises:
            ServingError: that one cannot be had either.
        """
        try:
            await self._engine.set_tracks(model, {track: tracks.get(track) for track in TRACKS})
        except ServingError as exc:
            logger.error("%s has its stable version alone: %s", model, exc)
            await self._engine.set_tracks(model, {"stable": tracks.get("stable")})


def _decided(release: Release | None) -> Decided:
    return None if release is None else (release.release_id, release.generation)
