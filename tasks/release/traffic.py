"""Moving traffic: tracks of the serving processes, and shares at the gateway.

Without a gateway before the server nothing splits requests or copies them, so a new version takes
over all at once and is watched alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import httpx

from tasks.contracts.rollout import Shares
from tasks.contracts.serving import address_file, address_files, is_live, read_addresses
from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tasks.release.records import Wanted

TRACKS = ("stable", "candidate", "shadow")
ANSWER_WITHIN_S = 10.0
LOAD_WITHIN_S = 300.0
"""A version is loaded and checked before its track is set."""


class NotServedError(DataContractError):
    """The server knows no such model or version."""


class TracksRefusedError(TransientError):
    """The server answers, and cannot set tracks now: a version cannot be loaded, most likely."""


class Traffic(Protocol):
    """Where requests for a model go."""

    @property
    def can_split(self) -> bool:
        """Whether requests can be shared between versions, or copied."""

    def tracks(self, model: str) -> Mapping[str, str | None]:
        """Version in each track; none where the server serves no version of the model yet.

        Of several processes, what the first one has: `set_traffic` brings all to the same.

        Raises:
            TransientError: the server does not answer, or has none of its versions ready.
        """

    def all_tracks(self, model: str) -> Sequence[Mapping[str, str | None]]:
        """The same of each serving process, where there are several.

        Raises:
            TransientError: as `tracks`.
        """

    def set_tracks(self, model: str, tracks: Mapping[str, str | None]) -> None:
        """Say which version each track means, all at once, in each serving process.

        Tracks that are not named stay as they are.

        Raises:
            TransientError: the server does not answer.
            TracksRefusedError: it does, and cannot load a version now.
            NotServedError: it knows no such model or version.
        """

    def shares(self, model: str) -> Shares:
        """How requests are shared now."""

    def set_shares(self, model: str, shares: Shares) -> None:
        """Share requests.

        Raises:
            ConfigurationError: there is nothing that could.
            TransientError: the gateway could not be reached.
        """


class Gateway(Protocol):
    """The gateway's side, shares from 0 to 1; see `infra.gateway.prepare.GatewayTraffic`."""

    def set_shares(self, model: str, *, candidate: float, mirror: float, sticky: bool) -> None:
        """Share requests from now on; returns when the gateway does so."""

    def shares(self, model: str) -> Any:
        """Attributes `candidate`, `mirror` and `sticky`."""


@dataclass(frozen=True)
class ServerTraffic:
    """The serving processes of this machine, behind a gateway where requests are split or copied.

    All of them get the same tracks. One that was killed is left out: it begins with the tracks of
    the ledger (see `tasks.release.ledger.tracks_at_start`), and follows it, as processes on other
    machines do.

    Attributes:
        home: the state folder; each process writes there where it listens.
        gateway: None where there is none.
    """

    home: Path
    gateway: Gateway | None = None

    @property
    def can_split(self) -> bool:
        """See `Traffic`."""
        return self.gateway is not None

    def tracks(self, model: str) -> Mapping[str, str | None]:
        """See `Traffic`."""
        return self.all_tracks(model)[0]

    def all_tracks(self, model: str) -> Sequence[Mapping[str, str | None]]:
        """See `Traffic`."""
        return [self._tracks(where, model) for where in _admin_addresses(self.home)]

    def _tracks(self, where: str, model: str) -> Mapping[str, str | None]:
        try:
            return _tracks(self._ask(where, "GET", model), model)
        except NotServedError:
            return dict.fromkeys(TRACKS)

    def set_tracks(self, model: str, tracks: Mapping[str, str | None]) -> None:
        """See `Traffic`."""
        for where in _admin_addresses(self.home):
            self._ask(where, "POST", model, dict(tracks))

    def shares(self, model: str) -> Shares:
        """See `Traffic`; without a gateway all requests go to the track `stable`."""
        if self.gateway is None:
            return Shares()
        known = self.gateway.shares(model)
        return Shares(
            candidate=round(known.candidate * 100, 4),
            mirror=round(known.mirror * 100, 4),
            sticky=known.sticky,
        )

    def set_shares(self, model: str, shares: Shares) -> None:
        """See `Traffic`."""
        if self.gateway is not None:
            self.gateway.set_shares(
                model,
                candidate=shares.candidate / 100,
                mirror=shares.mirror / 100,
                sticky=shares.sticky,
            )
        elif shares.candidate or shares.mirror:
            raise ConfigurationError(
                f"{model}: requests were to be split, and there is no gateway that could. Set one "
                "up (infra/gateway), or release all at once. Nothing was changed"
            )

    def _ask(self, where: str, method: str, model: str, body: Any = None) -> Any:
        path = f"{where}/admin/models/{model}" + ("/slots" if method == "POST" else "")
        limit = LOAD_WITHIN_S if method == "POST" else ANSWER_WITHIN_S
        try:
            answer = httpx.request(
                method,
                path,
                json=body,
                headers={"authorization": f"Bearer {_admin_token(self.home)}"},
                timeout=httpx.Timeout(limit, connect=ANSWER_WITHIN_S),
                trust_env=False,
            )
        except httpx.HTTPError as exc:
            raise TransientError(
                f"the server at {where} does not answer ({type(exc).__name__}); traffic of {model} "
                "is as it was. It is tried again"
            ) from exc
        return _checked(answer, model, where)


def set_traffic(traffic: Traffic, model: str, wanted: Wanted) -> bool:
    """Bring tracks and shares to what is wanted; True where something had to change.

    A track is filled before requests go to it, and emptied after the last one does. Doing it again
    changes nothing, and done by halves it is completed by the next call.
    """
    served = traffic.all_tracks(model)
    final: dict[str, str | None] = {track: getattr(wanted, track) for track in TRACKS}
    filled = {track: version for track, version in final.items() if version}
    changed = False
    if _differ(served, filled):
        traffic.set_tracks(model, filled)
        changed = True
    if not _is_shared(traffic.shares(model), wanted.shares):
        traffic.set_shares(model, wanted.shares)
        changed = True
    if _differ(served, {track: None for track in TRACKS if track not in filled}):
        traffic.set_tracks(model, final)
        changed = True
    return changed


def _differ(served: Sequence[Mapping[str, str | None]], wanted: Mapping[str, str | None]) -> bool:
    """Whether a process has another version in one of these tracks."""
    return any(one.get(track) != version for one in served for track, version in wanted.items())


def _is_shared(seen: Shares, wanted: Shares) -> bool:
    """Whether requests are shared as wanted; without a candidate it is no matter who sticks."""
    split = seen.candidate or wanted.candidate
    return (seen.candidate, seen.mirror) == (wanted.candidate, wanted.mirror) and (
        not split or seen.sticky == wanted.sticky
    )


def has_server(home: Path) -> bool:
    """Whether a serving process is ready on a state folder."""
    return bool(address_files(home))


def _admin_addresses(home: Path) -> list[str]:
    """Addresses of the admin listeners of all serving processes that live.

    Raises:
        TransientError: no serving process is ready.
        ConfigurationError: a file does not say where its process listens.
    """
    files = address_files(home)
    read = {file: read_addresses(file) for file in [*filter(is_live, files)] or files}
    found = {file: addresses.get("admin") for file, addresses in read.items() if addresses}
    if not found:
        raise TransientError(
            f"no serving process is ready: {address_file(home)} is not there. Start one with "
            "`make serve`"
        )
    for file, address in found.items():
        if not address:
            raise ConfigurationError(
                f"{file} does not say where the admin listener is; start the serving process again"
            )
    return [str(address) for address in found.values()]


def _admin_token(home: Path) -> str:
    file = home / "serving" / "secrets" / "admin-token"
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ConfigurationError(
            f"{file} cannot be read ({exc.strerror}); the serving process makes it, for its own "
            "user alone. Run this as that user"
        ) from exc


def _checked(answer: httpx.Response, model: str, where: str) -> Any:
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        reason = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        reason = answer.text[:200] or f"status {answer.status_code}"
    if answer.status_code == HTTPStatus.NOT_FOUND:
        raise NotServedError(f"the server at {where} has no such model or version: {reason}")
    if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ConfigurationError(
            f"the server at {where} does not accept the token of its own state folder: {reason}. "
            "Another process may listen there; start the serving process again"
        )
    if answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise DataContractError(f"the server at {where} refused traffic of {model}: {reason}")
    raise TracksRefusedError(f"the server at {where} could not set traffic of {model}: {reason}")


def _tracks(answer: Any, model: str) -> Mapping[str, str | None]:
    tracks = answer.get("slots") if isinstance(answer, dict) else None
    if not isinstance(tracks, dict) or not set(TRACKS) <= tracks.keys():
        raise DataContractError(
            f"the server's answer about {model} names no tracks; it is of another release of this "
            "project"
        )
    return {track: None if tracks[track] is None else str(tracks[track]) for track in TRACKS}
