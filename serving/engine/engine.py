"""The engine of a serving process: loaded models behind bounded queues, following the registry."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.config import EngineConfig, ServedModel
from serving.engine.dispatch import Dispatcher
from serving.engine.loading import RegistryCatalogue
from serving.engine.queues import Limits, sentence_of
from serving.engine.tracks import ServedVersions
from serving.engine.versions import Failure, LoadedVersion, VersionKey
from serving.errors import NotReadyError, ServingError, UnknownModelError
from serving.interfaces import Call, Done, Observer, Track, VersionState
from serving.repeated import Repeated
from tasks.contracts.conversion import Signature

logger = logging.getLogger(__name__)
Found = TypeVar("Found")
Counters = dict[str, dict[tuple[str, ...], float]]
"""Numbers by name and label values; see `LABELS`."""
_OF_QUEUE = ("model", "slot", "version")
_OF_BACKEND = ("model", "version", "variant", "hardware")
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("loaded_versions", "failed_loads", "passed_on"), ("model",)),
    **dict.fromkeys(("queued_requests", "queued_rows"), _OF_QUEUE),
    "missing_backends": ("model", "version"),
    **dict.fromkeys(("backend_closed", "backend_failures"), _OF_BACKEND),
}
"""Names of the labels of what is counted."""
GAUGES = frozenset(LABELS.keys() - {"passed_on", "backend_failures"})
"""What may fall; the rest only grows while a version is loaded."""


class ModelEngine:
    """Loaded models behind bounded queues. Everything is for the event loop's thread.

    Args:
        config: hardware, and how much is held.
        models: that are loaded at the start and followed.
        catalogue: where versions come from.
        limits: of queues, batches and the registry's retries.

    Attributes:
        observers: notified of every batch and refusal.
    """

    def __init__(
        self,
        config: EngineConfig,
        models: Sequence[ServedModel],
        catalogue: RegistryCatalogue,
        limits: Limits,
    ) -> None:
        self.config = config
        self.observers: list[Observer] = []
        self._catalogue = catalogue
        self._limits = limits
        self._models: dict[str, ServedVersions] = {}
        self._configured = {model.name: model for model in models}
        self._seen: dict[str, VersionKey] = {}
        self._ask_again = True
        self._following = Repeated("looking at the registry", limits.poll_s, self.look)
        self._dispatcher: Dispatcher
        self._loop: asyncio.AbstractEventLoop
        self._loader: ThreadPoolExecutor
        self._stopping = False

    # Life

    async def start(self) -> None:
        """Load what the configured aliases name, and follow them from now on.

        A model that cannot be loaded does not keep the process from starting: `states` reports it,
        and it is tried again.
        """
        self._loop = asyncio.get_running_loop()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._dispatcher = Dispatcher(
            self.config, self._limits, self._loop, self.observers, self._dispose
        )
        for name in self._configured:
            self.served(name)
        await self.look()
        self._following.start()

    async def stop(self, drain_s: float = 10.0) -> None:
        """Answer what is queued, refuse what comes, end all threads.

        Args:
            drain_s: for so long at most; what still waits then is refused.
        """
        self._stopping = True
        await self._following.stop()
        await self._dispatcher.drained(drain_s)
        self._dispatcher.abandon(lambda call: NotReadyError("the server is stopping"))
        await asyncio.sleep(0)
        self._loader.shutdown(wait=True, cancel_futures=True)
        await self._dispatcher.drained(drain_s)
        self._dispatcher.close()

    # Calls

    def submit(self, call: Call, done: Done) -> None:
        """Queue a call; whatever happens, `done` is called once, in a later turn of the loop."""
        model = self._models.get(call.model)
        if model is not None and call.version is None and not self._stopping:
            queue = model.queues.get(call.track)
            if queue is not None:
                self._dispatcher.queue(queue, call, done)
                return
        try:
            known = self._known(call.model)
            if self._stopping:
                raise NotReadyError("the server is stopping; ask another one")
            queue = known.queue(call.version, call.track)
        except ServingError as exc:
            self._dispatcher.outcomes.refuse(call, done, exc)
            return
        known.passed_on += call.version is None
        self._dispatcher.queue(queue, call, done)

    def refusal(
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> ServingError | None:
        """Why a call would be refused, asked before it is read; None where it is to be read.

        Whoever asks tells the client and the observers.
        """
        known = self._models.get(model)
        queue = known.queues.get(track) if known is not None and version is None else None
        return self._dispatcher.too_long(queue) if queue is not None else None

    def signature(
        self, model: str, version: str | None = None, track: Track = "stable"
    ) -> Signature:
        """What a model takes.

        Raises:
            UnknownModelError: there is no such model or version.
            NotReadyError: it is known and cannot answer now.
        """
        return self._known(model).queue(version, track).version.signature

    def states(self) -> Sequence[VersionState]:
        """All versions of all models, ready or not."""
        return [state for model in self._models.values() for state in model.states()]

    def is_ready(self, model: str | None = None, version: str | None = None) -> bool:
        """Whether a model's stable track, or this version, answers; None asks for all models."""
        if self._stopping:
            return False
        if model is None:
            return all(self._models[name].is_ready(None) for name in self._configured)
        known = self._models.get(model)
        return known is not None and known.is_ready(version)

    def tracks(self, model: str) -> Mapping[Track, str | None]:
        """Which version each track of a model means.

        Raises:
            UnknownModelError: there is no such model.
        """
        return self._known(model).tracks()

    def counters(self) -> Counters:
        """Everything that is counted now; observers count what was answered and refused."""
        found: Counters = {name: {} for name in LABELS}
        for name, state in self._models.items():
            found["loaded_versions"][name,] = len(state.versions)
            found["failed_loads"][name,] = len(state.failures)
            found["passed_on"][name,] = state.passed_on
            for track, queue in state.queues.items():
                of_queue = (name, track, queue.version.version)
                found["queued_requests"][of_queue] = len(queue.entries)
                found["queued_rows"][of_queue] = queue.rows
            for version in state.versions.values():
                found["missing_backends"][name, version.version] = len(version.troubles)
                for backend in version.backends:
                    of_backend = (name, version.version, backend.variant, backend.hardware)
                    found["backend_closed"][of_backend] = backend.circuit.closed
                    found["backend_failures"][of_backend] = backend.failures
        return found

    # Versions

    async def load(self, model: str, version: str | None = None) -> VersionState:
        """Load a version, check it and make it ready; without one, what the alias names is stable.

        Raises:
            UnknownModelError: the registry has no such version.
            NotReadyError: its files or its golden batch are not as recorded; what served before
                goes on.
        """
        if version is None:
            alias = (self._configured.get(model) or ServedModel(name=model)).alias
            key = await self._asked(self._catalogue.by_alias, model, alias)
            if key is None:
                raise UnknownModelError(
                    f"no version of {model!r} has the alias {alias!r} in the registry; promote "
                    "one, or name a version"
                )
        else:
            key = await self._asked(self._catalogue.by_number, model, version)
        state = self.served(model)
        async with state.lock:
            loaded = await self._loaded(state, key)
            if version is None:
                state.apply({"stable": loaded.version})
            else:
                state.pinned.add(loaded.version)
        return next(one for one in state.states() if one.version == loaded.version)

    async def unload(self, model: str, version: str | None = None) -> None:
        """Take a version, or a whole model, out of service after its last call.

        The alias is not followed back to it until it moves.
        """
        state = self._known(model)
        async with state.lock:
            if version is None:
                for number in [*state.versions, *state.failures]:
                    state.remove(number)
                state.notes["unloaded"] = (
                    "it was unloaded; load it again with "
                    f"POST /v2/repository/models/{model}/load (action admin)"
                )
                return
            if version not in state.versions and version not in state.failures:
                raise UnknownModelError(f"{model} version {version} is not loaded here")
            state.remove(version)

    async def set_tracks(self, model: str, tracks: Mapping[Track, str | None]) -> None:
        """Say which version each track means, all at once; None empties a track.

        A version is loaded and checked first. The one that leaves `stable` stays loaded.

        Raises:
            UnknownModelError, NotReadyError: as `load`; no track was changed.
        """
        state = self._models.get(model)
        if state is None:
            if not any(tracks.values()):
                raise UnknownModelError(f"there is no model {model!r} here whose tracks to empty")
            for number in filter(None, tracks.values()):
                await self._asked(self._catalogue.by_number, model, number)
            state = self.served(model)
        numbers = {number for number in tracks.values() if number is not None}
        if not state.num_pointing and numbers <= state.versions.keys():
            # Nothing is to be loaded, so going back waits for no other version that is.
            state.apply(tracks)
            return
        state.num_pointing += 1
        try:
            async with state.lock:  # all are loaded first, then all tracks change in one turn
                for number in sorted(numbers - state.versions.keys()):
                    key = await self._asked(self._catalogue.by_number, model, number)
                    await self._loaded(state, key, numbers)
                state.apply(tracks)
        finally:
            state.num_pointing -= 1

    def served(self, model: str) -> ServedVersions:
        """Versions of a model, known from now on."""
        found = self._models.get(model)
        if found is None:
            configured = self._configured.get(model) or ServedModel(name=model)
            found = self._models[model] = ServedVersions(
                model, configured.goal_ms, self._limits, self._dispatcher
            )
        return found

    async def _loaded(
        self, state: ServedVersions, key: VersionKey, wanted: Collection[str] = ()
    ) -> LoadedVersion:
        """A version out of memory, or loaded now; one with other variants is loaded again.

        Args:
            state: of the model.
            key: of the version.
            wanted: versions that are to stay loaded meanwhile.
        """
        loaded = state.versions.get(key.version)
        if loaded is not None and loaded.key == key:
            return loaded
        self._make_room(state, key, wanted)
        state.loading.add(key.version)
        try:
            opened = await self._loop.run_in_executor(self._loader, self._catalogue.open, key)
        except ServingError as exc:
            self._note_failure(state, key, exc)
            raise
        except Exception as exc:  # of a runtime that met a file it did not expect
            text = f"{key.model} version {key.version} cannot be loaded: {sentence_of(exc)}"
            logger.exception(text)
            error = NotReadyError(text)
            self._note_failure(state, key, error)
            raise error from exc
        finally:
            state.loading.discard(key.version)
        # What the libraries made stays: a pass over their million objects would hold up all calls,
        # for a tenth of a second and more.
        gc.freeze()
        state.notes.pop("unloaded", None)
        state.add(opened)
        return opened

    def _make_room(self, state: ServedVersions, key: VersionKey, wanted: Collection[str]) -> None:
        """Take former versions out until one more fits; those that answer stay.

        Raises:
            NotReadyError: all that are loaded answer, or were asked for by number.
        """
        while sum(len(one.versions) for one in self._models.values()) >= self.config.max_versions:
            for one in self._models.values():
                former = one.evictable()
                if former is not None and not (one is state and former in wanted):
                    one.remove(former)
                    break
            else:
                raise NotReadyError(
                    f"{self.config.max_versions} versions are loaded and all are in use, so "
                    f"{key.model} version {key.version} was not loaded; unload one first, "
                    "with POST /v2/repository/models/{model}/unload (action admin)"
                )

    def _note_failure(self, state: ServedVersions, key: VersionKey, error: Exception) -> None:
        former, limits = state.failures.get(key.version), self._limits
        attempts = 1 if former is None else former.attempts + 1
        delay_s = min(limits.most_retry_s, limits.retry_s * 2.0 ** min(attempts - 1, 30))
        again_at = time.monotonic() + delay_s
        state.failures[key.version] = Failure(str(error), key.digest, attempts, again_at)
        logger.warning("%s version %s was not loaded: %s", key.model, key.version, error)

    async def _asked(self, question: Callable[[str, str], Found], model: str, which: str) -> Found:
        """Ask the catalogue on the loader's thread."""
        return await self._loop.run_in_executor(self._loader, question, model, which)

    def _known(self, model: str) -> ServedVersions:
        state = self._models.get(model)
        if state is None:
            raise UnknownModelError(
                f"there is no model {model!r} here; there are {', '.join(self._models) or 'none'}"
            )
        return state

    def _dispose(self, version: LoadedVersion) -> None:
        """After the last use: free its memory where that holds nobody up."""
        version.closed = True
        backends = list(version.backends)
        version.backends = ()
        if not self._stopping:
            self._loader.submit(backends.clear)

    # The alias

    async def look(self) -> None:
        """Look at all aliases where the registry may have changed, or a load is due again.

        Moves alone count: an alias that names something else than the stable track does so because
        a person or a release changed the track, and that stands until the alias moves again.
        """
        changed = await asyncio.to_thread(self._catalogue.has_changed)
        if not (changed or self._ask_again or self._is_due()):
            return
        self._ask_again, again = True, False  # what fails here is asked again
        for model in self._configured.values():
            try:
                key = await self._asked(self._catalogue.by_alias, model.name, model.alias)
            except ServingError as exc:
                again = True
                self.served(model.name).notes["alias"] = str(exc)
                continue
            await self._see(model, key)
        self._ask_again = again

    async def _see(self, model: ServedModel, key: VersionKey | None) -> None:
        state = self.served(model.name)
        if key is None:
            state.notes["alias"] = (
                f"no version has the alias {model.alias!r}; train and promote one"
            )
            return
        state.notes.pop("alias", None)
        former, failure = self._seen.get(model.name), state.failures.get(key.version)
        if key == former or (
            failure and failure.digest == key.digest and time.monotonic() < failure.retry_at
        ):
            return
        track = _track(model, state.tracks()["stable"], key, is_first=former is None)
        if track is not None:
            try:
                async with state.lock:
                    await self._loaded(state, key)
                    state.apply({track: key.version})
            except ServingError as exc:
                logger.warning("%s stays as it is: %s", model.name, exc)
                return
            logger.info("%s: %s is version %s now", model.name, track, key.version)
        self._seen[model.name] = key

    def _is_due(self) -> bool:
        failures = [f for name in self._configured for f in self.served(name).failures.values()]
        return any(failure.retry_at <= time.monotonic() for failure in failures)


def _track(model: ServedModel, stable: str | None, key: VersionKey, is_first: bool) -> Track | None:
    """The track that is to mean what the alias names now; None where nothing is to be done."""
    if model.on_move == "swap" or (is_first and stable is None):
        return "stable"
    return None if key.version == stable else "candidate"
