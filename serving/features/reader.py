"""Requests that name entities: features from the online store, as the answering version takes them.

    request (keys) --resolve--> read thread --Feast's online store--> inputs + what was read

Definitions are opened by a thread of their own, so that neither the event loop nor a read waits for
a registry.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from feast import FeatureStore
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from serving.config import EntityConfig
from serving.errors import NotReadyError, UnknownModelError
from serving.features.reads import RETRY_AFTER_S, Resolved, SharedReads
from serving.features.recipe import Origins, Recipe, checked_columns, open_recipe, registry_origins
from serving.interfaces import Track, VersionState
from serving.repeated import Repeated
from tasks.contracts.clock import ClockConfig
from tasks.features.access.profile import profile_file
from tasks.features.access.store import open_store
from tasks.features.config import OnlineConfig
from tasks.kernel.errors import ConfigurationError, FalajError, TransientError
from tasks.kernel.files import file_state, read_yaml
from tasks.kernel.settings import USE_CASE_FILE, Settings

logger = logging.getLogger(__name__)
FOLLOW_S = 15.0
"""Between two looks at the served versions."""
REFUSED_S = 300.0
"""Until a version whose definitions are refused is looked at again: reading all definitions holds
the interpreter for 0.1 to 0.3 s."""

States = Callable[[], Sequence[VersionState]]
Key = tuple[str, str]
"""Model and version."""


@dataclass(frozen=True)
class Refusal:
    """Why entity requests for a version cannot be answered now.

    Attributes:
        again_at: `time.monotonic()` from which on it is opened again.
        retry_after_s: for clients, where it may pass soon.
    """

    reason: str
    again_at: float = 0.0
    retry_after_s: float | None = RETRY_AFTER_S


Known = Recipe | Refusal | None
"""None: the version was not trained on feature views."""


class FeastEntityReader:
    """Turns requests that name entities into model inputs. Made and used on the event loop.

    Args:
        settings: where the feature repository, its stores and the model registry are.
        config: moments and bounds.
        states: versions that this process serves, as `ModelEngine.states` reports them.
        origins: what a version was trained with; None asks the model registry.
    """

    LABELS: ClassVar = {"freshness": ("view", "state"), "refused": ("reason",)}
    """Names of the labels of `counters`."""

    def __init__(
        self,
        settings: Settings,
        config: EntityConfig | None = None,
        *,
        states: States,
        origins: Origins | None = None,
    ) -> None:
        self._settings, self._config = settings, config or EntityConfig()
        self._states, self._origins = states, origins or registry_origins(settings)
        self._known: dict[Key, Known] = {}
        self._online, self._clock = OnlineConfig(), ClockConfig()
        self._store: FeatureStore | None = None
        self._opened_from: tuple[object, ...] = ()
        self._definitions = ThreadPoolExecutor(1, thread_name_prefix="entity-definitions")
        self._reads = SharedReads(self._config.max_rows, self.moment)
        self._following = Repeated("looking at features", FOLLOW_S, self.follow)

    async def start(self) -> None:
        """Open what the served versions read, and follow them from now on.

        Raises:
            ConfigurationError: the use case or the store's profile is wrong.
        """
        await self.follow()
        self._following.start()

    async def stop(self) -> None:
        """End the threads and close the connections."""
        await self._following.stop()
        await self._reads.stop()
        await asyncio.to_thread(self._definitions.shutdown)
        self._forget(list(self._known))

    async def follow(self) -> None:
        """Look now at the served versions; call it after a version was loaded."""
        served = [(state.name, state.version) for state in _served(self._states())]
        await self._in_thread(self._look, served)

    def keys_of(self, model: str) -> frozenset[str] | None:
        """Key columns of a model's feature service; None where it has none here.

        Raises:
            UnknownModelError: this process serves no such model.
            NotReadyError: its features are not opened yet, or its definitions are refused.
        """
        recipe = self.recipe((model, self._version(model, None, "stable")))
        return None if recipe is None else recipe.keys

    async def resolve(
        self,
        model: str,
        entities: Mapping[str, Sequence[Any]],
        version: str | None = None,
        track: Track = "stable",
    ) -> Resolved:
        """Inputs for these entities, and what was read for them (goes to `Call.features`).

        `version` and `track` say which version will answer, as in `Call`.

        Raises:
            UnknownModelError: this process serves no such model or version.
            BadRequestError: a key is absent or impossible.
            FeaturesRefusedError: features are missing or stale, and the policy is to refuse.
            NotReadyError: the online store is away, or the version's features are not open.
            OverloadedError: as many requests wait for features as may.
        """
        key = (model, self._version(model, version, track))
        if key not in self._known:
            await self._in_thread(self._prepare, key)
        recipe = self.recipe(key)
        if recipe is None:
            raise UnknownModelError(
                f"{model} version {key[1]} was not trained on feature views, so it takes no entity "
                "keys; send its inputs"
            )
        columns, num_rows = checked_columns(recipe, entities, self._config.max_rows)
        return await self._reads.read(recipe, columns, num_rows)

    def counters(self) -> dict[str, Any]:
        """Counters since the start, and how fresh each view was found; for metrics."""
        freshness: Counter[tuple[str, str]] = Counter()
        for recipe in list(self._known.values()):
            if isinstance(recipe, Recipe):
                for view, counts in recipe.reader.num_rows_by_state().items():
                    freshness.update({(view, state): rows for state, rows in counts.items()})
        return {
            **self._reads.counted,
            "waiting": len(self._reads.waiting),
            "refused": dict(self._reads.refused),
            "failed_looks": self._following.num_failed,
            "freshness": dict(freshness),
        }

    def recipe(self, key: Key) -> Recipe | None:
        """How the inputs of a version are made; None where it was not trained on feature views.

        Raises:
            NotReadyError: it is not opened yet, or its definitions are refused.
        """
        known = self._known.get(key, _NOT_OPENED)
        if isinstance(known, Refusal):
            raise NotReadyError(known.reason, known.retry_after_s)
        return known

    def moment(self) -> datetime | None:
        """At which ages count now; None for the wall clock."""
        chosen, clock = self._config.moment, self._clock
        if isinstance(chosen, datetime):
            return chosen
        if chosen == "wall" or clock.replay_year is None:
            return None
        return clock.shows(datetime.now(UTC))

    def _version(self, model: str, version: str | None, track: Track) -> str:
        served = [state for state in _served(self._states()) if state.name == model]
        if not served:
            raise UnknownModelError(f"model {model!r} is not served here")
        for state in served:
            if state.version == version if version is not None else track in state.tracks:
                return state.version
        if version is None and track == "candidate":
            return self._version(model, None, "stable")  # which answers for an empty one
        if version is None:
            raise NotReadyError(f"no version of {model} is ready in track {track}")
        raise UnknownModelError(f"version {version!r} of model {model!r} is not served here")

    async def _in_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._definitions, work, *arguments)

    # On the thread of definitions

    def _look(self, served: Sequence[Key]) -> None:
        self._open_store()
        self._forget([key for key in self._known if key not in served])
        for key in served:
            self._prepare(key)

    def _open_store(self) -> None:
        """Open the store, and all versions again, where its files changed."""
        repo = self._settings.feature_repo
        files = file_state(profile_file(repo)), file_state(repo / USE_CASE_FILE)
        if self._store is None or files != self._opened_from:
            self._online, self._clock = _read_use_case(repo)
            self._store = open_store(self._settings.features_home, repo)
            self._opened_from = files
            self._forget(list(self._known))

    def _prepare(self, key: Key) -> None:
        """Open what a version reads, where that was not done or was refused a while ago."""
        before = self._known.get(key, _NOT_OPENED)
        if not isinstance(before, Refusal) or time.monotonic() < before.again_at:
            return
        try:
            if self._store is None:
                self._open_store()
            assert self._store is not None
            try:
                self._store.refresh_registry()
            except SQLAlchemyError as exc:
                raise TransientError(f"the feature registry could not be read ({exc})") from exc
            self._known[key] = open_recipe(self._store, *key, self._origins(*key), self._online)
        except TransientError as exc:
            self._known[key] = Refusal(str(exc))
        except FalajError as exc:
            if before.reason != str(exc):
                logger.error("entity requests of %s version %s: %s", *key, exc)
            self._known[key] = Refusal(str(exc), time.monotonic() + REFUSED_S, None)

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            known = self._known.pop(key)
            if isinstance(known, Recipe):
                known.reader.close()


_NOT_OPENED = Refusal("the features of this version are not opened yet; try again")


def _served(states: Sequence[VersionState]) -> list[VersionState]:
    return [state for state in states if state.state == "READY"]


def _read_use_case(repo: Path) -> tuple[OnlineConfig, ClockConfig]:
    """What a feature repository says of reads and of its clock.

    Raises:
        ConfigurationError: the file is missing or is not what it should be.
    """
    file = repo / USE_CASE_FILE
    try:
        described = read_yaml(file, USE_CASE_FILE)
        online = (described.get("features") or {}).get("online") or {}
        clock = described.get("clock") or {}
        return OnlineConfig.model_validate(online), ClockConfig.model_validate(clock)
    except (OSError, ConfigurationError, ValidationError, AttributeError) as exc:
        raise ConfigurationError(
            f"{file} cannot be read as a use case ({exc}); name a feature repository with "
            "FALAJ_FEATURE_REPO. No entity request can be served"
        ) from exc
