"""Requests that name entities: features from the online store, as the answering version takes them.

    request (keys) --resolve--> read thread --Feast's online store--> inputs + what was read

Definitions are opened and followed by a thread of their own, so that neither the event loop nor a
read waits for a registry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from feast import FeatureStore
from feast.infra.registry.sql import SqlRegistry
from sqlalchemy.exc import SQLAlchemyError

from serving.errors import NotReadyError, UnknownModelError
from serving.features.answer import EntityFeatures
from serving.features.config import EntityConfig, read_use_case
from serving.features.reads import RETRY_AFTER_S, ReadThread, Resolved
from serving.features.recipe import (
    ModelOrigin,
    Recipe,
    RegistryOrigins,
    fingerprint,
    open_recipe,
    service_of,
)
from serving.features.request import checked_columns
from serving.interfaces import Track, VersionState
from tasks.contracts.clock import ClockConfig
from tasks.contracts.conversion import Signature, tabular_signature
from tasks.features.access.profile import profile_file
from tasks.features.access.store import open_store
from tasks.features.config import OnlineConfig
from tasks.kernel.errors import FalajError, TransientError
from tasks.kernel.files import file_state
from tasks.kernel.settings import USE_CASE_FILE, Settings

SETTLED_S = 2
"""A change may follow another one within the same second; after so long it cannot."""

Stamp = tuple[object, ...]


def registry_stamp(store: FeatureStore) -> Stamp | None:
    """A value that changes with the registry; None where only reading it all would tell."""
    registry = store.registry
    if not isinstance(registry, SqlRegistry):
        return None
    changed = registry._get_last_updated_metadata(store.project)
    if changed is None or time.time() - changed.timestamp() < SETTLED_S:
        return None
    return (changed,)


logger = logging.getLogger(__name__)
FOLLOW_S = 15.0
"""Between two looks at the served versions and at the feature registry."""

States = Callable[[], Sequence[VersionState]]
Origins = Callable[[str, str], ModelOrigin]
Key = tuple[str, str]
"""Model and version."""


@dataclass(frozen=True)
class Refusal:
    """Why entity requests for a version cannot be answered; asked again at the next look."""

    reason: str
    may_pass: bool


Known = Recipe | Refusal | None
"""None: the version was not trained on feature views."""


class FeastEntityReader:
    """Fulfils `serving.interfaces.EntityReader`. Made and used on the event loop.

    Args:
        settings: where the feature repository, its stores and the model registry are.
        config: policies and bounds.
        states: versions that this process serves, as `Engine.states` tells them.
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
        self._states, self._origins = states, origins or RegistryOrigins(settings)
        self._known: dict[Key, Known] = {}
        self._online: OnlineConfig | None = None
        self._clock: ClockConfig | None = None
        self._store: FeatureStore | None = None
        self._opened_from: Stamp = ()
        self._seen: Stamp | None = None
        self._definitions = ThreadPoolExecutor(1, thread_name_prefix="entity-definitions")
        self._reads = ReadThread(self._config.max_rows, self._moment)
        self._following: asyncio.Task[None] | None = None
        self._num_looks = self._num_failed_looks = self._num_reopened = 0

    async def start(self) -> None:
        """Open what the served versions read, and follow them from now on.

        Raises:
            ConfigurationError: the use case or the store's profile is wrong.
        """
        self._reads.start()
        await self.follow()
        self._following = asyncio.create_task(self._follow_forever(), name="entity-definitions")

    async def stop(self) -> None:
        """End the threads and close the connections."""
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        await asyncio.to_thread(self._reads.stop)
        await asyncio.to_thread(self._definitions.shutdown)
        for known in self._known.values():
            _close(known)

    async def follow(self) -> None:
        """Look now at the served versions and the registry; call it after a version was loaded."""
        served = [(state.name, state.version) for state in _served(self._states())]
        await self._in_thread(self._look, served)

    def keys_of(self, model: str) -> frozenset[str] | None:
        """See `EntityReader`.

        Raises:
            UnknownModelError: this process serves no such model.
            NotReadyError: its features are not opened yet, or its definitions are refused.
        """
        recipe = self._recipe((model, self._version(model, None, "stable")))
        return None if recipe is None else recipe.keys

    async def resolve(
        self,
        model: str,
        entities: Mapping[str, Sequence[Any]],
        signature: Signature,
        version: str | None = None,
        track: Track = "stable",
    ) -> Resolved:
        """See `EntityReader`; `version` and `track` say which version will answer.

        Raises:
            UnknownModelError: this process serves no such model or version.
            OverloadedError: as many requests wait for features as may.
        """
        key = (model, self._version(model, version, track))
        if key not in self._known:
            await self._in_thread(self._prepare, key)
        recipe = self._recipe(key)
        if recipe is None:
            raise UnknownModelError(
                f"{model} version {key[1]} was not trained on feature views, so it takes no entity "
                "keys; send its inputs"
            )
        if not _takes(signature, recipe):
            raise NotReadyError(
                f"{model} was changed while the request was read: version {recipe.version} takes "
                "other columns than the one that answers. Nothing was read; send it again",
                RETRY_AFTER_S,
            )
        columns, num_rows, absent = checked_columns(recipe, entities, self._config)
        return await self._reads.read(recipe, columns, num_rows, absent)

    def report(self, features: Any) -> Mapping[str, Any]:
        """See `EntityReader`."""
        assert isinstance(features, EntityFeatures)
        return features.report()

    def counters(self) -> dict[str, Any]:
        """Counters since the start, and how fresh each view was found; for metrics."""
        counted = self._reads.counters
        freshness: dict[str, dict[str, int]] = {}
        for recipe in list(self._known.values()):
            if not isinstance(recipe, Recipe):
                continue
            for view, counts in recipe.reader.num_rows_by_state().items():
                into = freshness.setdefault(view, {})
                for state, rows in counts.items():
                    into[state] = into.get(state, 0) + rows
        return {
            "requests": counted.num_requests,
            "rows": counted.num_rows,
            "reads": counted.num_reads,
            "shared": counted.num_shared,
            "waiting": self._reads.num_waiting,
            "refused": dict(counted.refused),
            "looks": self._num_looks,
            "failed_looks": self._num_failed_looks,
            "reopened": self._num_reopened,
            "freshness": freshness,
        }

    # On the event loop

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

    def _recipe(self, key: Key) -> Recipe | None:
        known = self._known.get(key, _UNKNOWN)
        if isinstance(known, Refusal):
            retry = RETRY_AFTER_S if known.may_pass else None
            raise NotReadyError(known.reason, retry)
        return known

    async def _follow_forever(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self.follow()
            except Exception as exc:  # the next look may go well; what is open goes on
                self._num_failed_looks += 1
                unexpected = None if isinstance(exc, FalajError) else exc
                logger.warning("features were not looked at: %s", exc, exc_info=unexpected)

    async def _in_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._definitions, work, *arguments)

    # On the read threads

    def _moment(self) -> datetime | None:
        chosen = self._config.moment
        if isinstance(chosen, datetime):
            return chosen
        clock = self._clock
        if chosen == "wall" or clock is None or clock.replay_year is None:
            return None
        return clock.shows(datetime.now(UTC))

    # On the thread of definitions

    def _look(self, served: Sequence[Key]) -> None:
        self._num_looks += 1
        may_have_moved = self._open()
        for key in [key for key in self._known if key not in served]:
            _close(self._known.pop(key))
        for key in served:
            if may_have_moved or not isinstance(self._known.get(key, _UNKNOWN), Recipe):
                self._prepare(key)

    def _open(self) -> bool:
        """Open the store, anew where its files changed, or look whether its registry has moved.

        Returns:
            Whether definitions may be others than at the last look.
        """
        repo = self._settings.feature_repo
        files = file_state(profile_file(repo)), file_state(repo / USE_CASE_FILE)
        if self._store is None or files != self._opened_from:
            self._online, self._clock = read_use_case(repo)
            self._store = open_store(self._settings.features_home, repo)
            self._opened_from, self._seen = files, self._registry_stamp()
            for key in list(self._known):
                _close(self._known.pop(key))
            return True
        seen = self._registry_stamp()
        if seen is not None and seen == self._seen:
            return False
        with _registry_explained():
            self._store.refresh_registry()
        self._seen = seen
        return True

    def _registry_stamp(self) -> Stamp | None:
        """Before definitions are read: a change in between is then seen at the next look."""
        assert self._store is not None
        with _registry_explained():
            return registry_stamp(self._store)

    def _prepare(self, key: Key) -> None:
        """Open a version's recipe, or open it anew where its definitions moved."""
        before = self._known.get(key)
        if before is None and key in self._known:
            return  # without feature views, for good
        try:
            if self._store is None:
                self._open()
            if isinstance(before, Recipe) and not self._moved(before):
                return
            origin = before.origin if isinstance(before, Recipe) else self._origins(*key)
            self._known[key] = self._recipe_of(key, origin)
        except TransientError as exc:
            if isinstance(before, Recipe):  # goes on with what it had
                self._num_failed_looks += 1
                logger.warning("definitions of %s version %s: %s", *key, exc)
                return
            self._known[key] = Refusal(str(exc), may_pass=True)
        except FalajError as exc:
            if not isinstance(before, Refusal) or before.reason != str(exc):
                logger.error("entity requests of %s version %s: %s", *key, exc)
            self._known[key] = Refusal(str(exc), may_pass=False)
        if isinstance(before, Recipe):
            self._num_reopened += 1
            _close(before)

    def _recipe_of(self, key: Key, origin: ModelOrigin) -> Recipe | None:
        assert self._store is not None
        online = self._config.online or self._online
        assert online is not None
        return open_recipe(self._store, *key, origin, self._config, online)

    def _moved(self, recipe: Recipe) -> bool:
        assert self._store is not None
        key, origin = (recipe.model, recipe.version), recipe.origin
        service = service_of(self._store, *key, origin, self._config)
        return fingerprint(self._store, service) != recipe.fingerprint


_UNKNOWN = Refusal("the features of this version are not opened yet; try again", may_pass=True)


@contextmanager
def _registry_explained() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as exc:
        raise TransientError(
            f"the feature registry could not be read ({type(exc).__name__}: {exc}); what was "
            "opened before goes on"
        ) from exc


def _served(states: Sequence[VersionState]) -> list[VersionState]:
    return [state for state in states if state.state == "READY"]


def _takes(signature: Signature, recipe: Recipe) -> bool:
    expected = tabular_signature(recipe.columns).inputs
    return [(s.name, s.columns) for s in signature.inputs] == [
        (s.name, s.columns) for s in expected
    ]


def _close(known: Known) -> None:
    if isinstance(known, Recipe):
        known.reader.close()
