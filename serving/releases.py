"""The tracks of a serving process are those of the releases of its models, wherever it runs.

Whoever decides sets the tracks of all processes of its machine at once. What a process begins with,
and what one on another machine does, comes from the ledger, which all of them share.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from serving.config import ServingConfig
from serving.engine.engine import ModelEngine
from serving.errors import ServingError
from serving.interfaces import TRACKS
from serving.repeated import Repeated
from tasks.kernel.errors import FalajError, TransientError
from tasks.kernel.settings import Settings
from tasks.release.ledger import ReleaseLedger, tracks_at_start
from tasks.release.records import Release
from tasks.release.traffic import ServerTraffic

logger = logging.getLogger(__name__)
Tracks = Mapping[str, str | None]


class FollowedReleases:
    """Sets tracks as releases have decided; for models whose moved alias is offered to them.

    Args:
        engine: of this process.
        settings: where the ledger is.
        config: the models, and how often to look.
    """

    def __init__(self, engine: ModelEngine, settings: Settings, config: ServingConfig) -> None:
        self._engine, self._settings = engine, settings
        self._models = [model.name for model in config.models if model.on_move == "offer"]
        self._seen: dict[str, tuple[str, int] | None] = {}
        self._trouble: dict[str, str] = {}
        self._following = Repeated("following releases", config.poll_s, self._look_at_all)

    async def start(self) -> None:
        """Begin with the tracks of open releases, or with those of the other processes.

        The alias names the candidate of an open release already. Where tracks cannot be known or
        had, the alias decides, and the release's next cycle corrects it.
        """
        await self._look_at_all()
        if self._models:
            self._following.start()

    async def stop(self) -> None:
        """Follow no more."""
        await self._following.stop()

    async def _look_at_all(self) -> None:
        looks = await asyncio.gather(*map(self._look, self._models), return_exceptions=True)
        for failed in filter(None, looks):  # that of one model keeps no other from being looked at
            raise failed

    async def _look(self, model: str) -> None:
        """Set the tracks that were decided since the last look; at the first one, the tracks now.

        It is looked again until nothing was decided meanwhile: the latest decision stays. What
        failed is tried again at the next look.
        """
        try:
            while True:
                release = await asyncio.to_thread(self._last, model)
                decided = (release.release_id, release.generation) if release else None
                if model in self._seen and self._seen[model] == decided:
                    break
                first = model not in self._seen
                champion = self._engine.tracks(model).get("stable") or ""
                tracks = await asyncio.to_thread(self._tracks, model, release, champion, first)
                if tracks is not None:
                    await self._set(model, tracks)
                self._seen[model] = decided
            self._trouble.pop(model, None)
        except (FalajError, ServingError) as exc:
            if self._trouble.get(model) != str(exc):  # once, not every few seconds
                logger.error("the tracks of a release of %s are not set: %s", model, exc)
            self._trouble[model] = str(exc)

    def _last(self, model: str) -> Release | None:
        return ReleaseLedger(self._settings.metadata_url).last_release(model)

    def _tracks(
        self, model: str, release: Release | None, champion: str, first: bool
    ) -> Tracks | None:
        if release and not first:
            return release.wanted.model_dump(exclude={"shares"})
        if decided := tracks_at_start(self._settings.metadata_url, model, champion):
            return decided
        with suppress(TransientError):  # none of the others answers
            others = ServerTraffic(self._settings.home).tracks(model)
            return others if others.get("stable") else None
        return None

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
