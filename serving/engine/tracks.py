"""One model of a process: its loaded versions and which track means which of them."""

import asyncio
from collections.abc import Mapping

from serving.engine.dispatch import Dispatcher
from serving.engine.queues import Limits, RequestQueue
from serving.engine.versions import Failure, LoadedVersion
from serving.errors import NotReadyError, UnknownModelError
from serving.interfaces import TRACKS, Track, VersionState


class ServedVersions:
    """Versions, tracks and queues of one model; on the event loop's thread alone.

    Args:
        name: of the model.
        goal_ms: of its answers.
        limits: bounds.
        dispatcher: of the process.

    Attributes:
        lock: held by whoever loads versions or changes tracks.
        pinned: versions that were asked for by number, and stay until they are unloaded.
        former: the former stable version, which stays loaded so that going back is quick.
        num_pointing: changes of tracks that wait for the lock, or for a version.
    """

    def __init__(self, name: str, goal_ms: float, limits: Limits, dispatcher: Dispatcher) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.queues: dict[Track, RequestQueue] = {}
        self.versions: dict[str, LoadedVersion] = {}
        self.pinned: set[str] = set()
        self.former: str | None = None
        self.num_pointing = 0
        self.loading: set[str] = set()
        self.failures: dict[str, Failure] = {}
        self.notes: dict[str, str] = {}
        self.passed_on = 0
        """Calls for an empty candidate track, which the stable version answered."""
        self._goal_ms = goal_ms
        self._limits = limits
        self._dispatcher = dispatcher
        self._explicit: dict[tuple[str, Track], RequestQueue] = {}

    def tracks(self) -> dict[Track, str | None]:
        """Which version each track means."""
        return {s: self.queues[s].version.version if s in self.queues else None for s in TRACKS}

    def tracks_of(self, version: LoadedVersion) -> tuple[Track, ...]:
        """Tracks that mean a version."""
        return tuple(s for s in TRACKS if s in self.queues and self.queues[s].version is version)

    def queue(self, version: str | None, track: Track) -> RequestQueue:
        """The queue for a call.

        An empty candidate track is answered by the stable version, so that no call is lost when a
        release ends before the edge knows of it; the answer says `stable`, and it is counted.

        Raises:
            UnknownModelError: there is no such version.
            NotReadyError: it is known and cannot answer now.
        """
        if version is not None:
            return self._explicit_queue(version, track)
        found = self.queues.get(track)
        if found is None and track == "candidate":
            found = self.queues.get("stable")
        if found is None:
            raise NotReadyError(self._why_not(track))
        return found

    def apply(self, changes: Mapping[Track, str | None]) -> None:
        """Change tracks to loaded versions, all in this turn of the loop; None empties one.

        What waits is answered by the new version.
        Where a track's versions differ in what they take, what waits is answered by the former one.
        """
        leaving = self.tracks()["stable"]
        for track in TRACKS:
            if track in changes:
                number = changes[track]
                self._point(track, self.versions[number] if number else None)
        if leaving is not None and self.tracks()["stable"] != leaving:
            self.former = leaving
        for number in self.versions.keys() - self._used() - self.pinned - {self.former}:
            self.remove(number)

    def add(self, version: LoadedVersion) -> None:
        """Take in a version; one of the same number makes way, in its tracks too."""
        former = self.versions.get(version.version)
        self.versions[version.version] = version
        self.failures.pop(version.version, None)
        if former is not None and former is not version:
            for track in self.tracks_of(former):
                self._point(track, version)
            self._close(former)

    def remove(self, number: str) -> None:
        """Take one version out of all tracks and out of memory, after its last call."""
        version = self.versions.pop(number, None)
        self.pinned.discard(number)
        self.failures.pop(number, None)
        if number == self.former:
            self.former = None
        if version is None:
            return
        for track in self.tracks_of(version):
            self._point(track, None)
        self._close(version)

    def evictable(self) -> str | None:
        """The version that only stays for speed."""
        return None if self.former in self._used() | self.pinned else self.former

    def states(self) -> list[VersionState]:
        """All versions that are loaded, are being loaded, or could not be."""
        found = [self._state(version) for version in self.versions.values()]
        for number in self.loading - self.versions.keys():
            found.append(VersionState(self.name, number, "LOADING", "it is being loaded"))
        for number in self.failures.keys() - self.versions.keys() - self.loading:
            reason = self.failures[number].reason
            found.append(VersionState(self.name, number, "UNAVAILABLE", reason))
        return sorted(found, key=lambda state: (len(state.version), state.version))

    def is_ready(self, version: str | None) -> bool:
        """Whether the stable track, or a version, answers."""
        loaded = self.versions.get(version or self.tracks()["stable"] or "")
        return loaded is not None and any(one.circuit.closed for one in loaded.backends)

    def _state(self, version: LoadedVersion) -> VersionState:
        well = [one for one in version.backends if one.circuit.closed]
        first = (well or version.backends)[0]
        reason = "; ".join(f"{one.hardware}: {one.circuit.reason}" for one in version.backends)
        tracks, shown = self.tracks_of(version), (first.variant, first.hardware, first.platform)
        if not well:
            return VersionState(self.name, version.version, "UNAVAILABLE", reason, tracks, *shown)
        return VersionState(self.name, version.version, "READY", "", tracks, *shown)

    def _used(self) -> set[str]:
        return {queue.version.version for queue in self.queues.values()}

    def _new_queue(self, version: LoadedVersion, track: Track) -> RequestQueue:
        return RequestQueue(version, track, self._limits, self._goal_ms)

    def _explicit_queue(self, number: str, track: Track) -> RequestQueue:
        found = self._explicit.get((number, track))
        if found is not None:
            return found
        version = self.versions.get(number)
        if version is None:
            if number in self.failures or number in self.loading:
                reason = self.failures[number].reason if number in self.failures else "it is loaded"
                raise NotReadyError(f"{self.name} version {number} cannot answer now: {reason}")
            raise UnknownModelError(
                f"{self.name} version {number} is not loaded here; loaded are "
                f"{', '.join(sorted(self.versions)) or 'none'}. Load it first"
            )
        queue = self._explicit[number, track] = self._new_queue(version, track)
        return queue

    def _point(self, track: Track, version: LoadedVersion | None) -> None:
        queue = self.queues.get(track)
        if version is None:
            if queue is not None:
                del self.queues[track]
                self._pass_on(queue)
        elif queue is None or queue.version.signature != version.signature:
            self.queues[track] = self._new_queue(version, track)
        else:
            self._dispatcher.retarget(queue, version)

    def _pass_on(self, queue: RequestQueue) -> None:
        """What waits for an emptied track goes to the stable version where that takes the same."""
        stable = self.queues.get("stable")
        if queue.track == "candidate" and stable is not None:
            if stable.version.signature == queue.version.signature:
                self.passed_on += len(queue.entries)
                self._dispatcher.retarget(queue, stable.version)
                queue.track = "stable"

    def _close(self, version: LoadedVersion) -> None:
        """Let a version go after its last call."""
        self._explicit = {k: q for k, q in self._explicit.items() if k[0] != version.version}
        version.closing = True
        if not version.uses:
            self._dispatcher.idle(version)

    def _why_not(self, track: Track) -> str:
        if track == "shadow":
            return f"{self.name} has no shadow version"
        reasons = [f"version {n}: {one.reason}" for n, one in self.failures.items()]
        known = "; ".join((*reasons, *self.notes.values())) or "none was loaded yet"
        return f"no version of {self.name} can answer: {known}"
