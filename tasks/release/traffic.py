"""Moving traffic: tracks of the serving process, and shares at the edge.

Without an edge before the server nothing splits requests or copies them, so a new version takes
over all at once and is watched alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import httpx

from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tasks.release.records import Shares, Wanted

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

        Raises:
            TransientError: the server does not answer, or has none of its versions ready.
        """

    def set_tracks(self, model: str, tracks: Mapping[str, str | None]) -> None:
        """Say which version each track means, all at once.

        Raises:
            TransientError: the server does not answer.
            TracksRefusedError: it does, and cannot load a version now.
            NotServedError: it knows no such model or version.
        """

    def shares(self, model: str) -> Shares:
        """How requests are shared now."""

    def set_shares(self, model: str, candidate: float, mirror: float, sticky: bool) -> None:
        """Share requests; percent.

        Raises:
            ConfigurationError: there is nothing that could.
            TransientError: the edge could not be told.
        """


class Edge(Protocol):
    """The edge's side: shares from 0 to 1, as `infra.gateway.traffic.GatewayTraffic` takes them."""

    def set_shares(self, model: str, *, candidate: float, mirror: float, sticky: bool) -> None:
        """Share requests from now on; returns when the edge does so."""

    def shares(self, model: str) -> Any:
        """Attributes `candidate`, `mirror` and `sticky`."""


@dataclass(frozen=True)
class ServerTraffic:
    """One serving process, alone or behind an edge that splits and copies requests.

    Attributes:
        home: the state folder; the server writes there where it listens.
        edge: None where there is none.
    """

    home: Path
    edge: Edge | None = None

    @property
    def can_split(self) -> bool:
        """See `Traffic`."""
        return self.edge is not None

    def tracks(self, model: str) -> Mapping[str, str | None]:
        """See `Traffic`."""
        try:
            return _tracks(self._ask("GET", model), model)
        except NotServedError:
            return dict.fromkeys(TRACKS)

    def set_tracks(self, model: str, tracks: Mapping[str, str | None]) -> None:
        """See `Traffic`."""
        self._ask("POST", model, dict(tracks))

    def shares(self, model: str) -> Shares:
        """See `Traffic`; without an edge all requests go to the track `stable`."""
        if self.edge is None:
            return Shares()
        told = self.edge.shares(model)
        return Shares(
            candidate=round(told.candidate * 100, 4),
            mirror=round(told.mirror * 100, 4),
            sticky=told.sticky,
        )

    def set_shares(self, model: str, candidate: float, mirror: float, sticky: bool) -> None:
        """See `Traffic`."""
        if self.edge is not None:
            shares = candidate / 100, mirror / 100
            self.edge.set_shares(model, candidate=shares[0], mirror=shares[1], sticky=sticky)
        elif candidate or mirror:
            raise ConfigurationError(
                f"{model}: {candidate:g} % of the requests and copies of {mirror:g} % were to go "
                "to the candidate, and there is no edge that could split requests. Set one up "
                "(infra/gateway), or release all at once. Nothing was changed"
            )

    def _ask(self, method: str, model: str, body: Any = None) -> Any:
        where = server_address(self.home)
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
    before = dict(traffic.tracks(model))
    final: dict[str, str | None] = {
        "stable": wanted.stable,
        "candidate": wanted.candidate,
        "shadow": wanted.shadow,
    }
    first = {track: final[track] or before.get(track) for track in TRACKS}
    changed = False
    if first != {track: before.get(track) for track in TRACKS}:
        traffic.set_tracks(model, first)
        changed = True
    if not is_shared(traffic.shares(model), wanted.shares):
        share_as(traffic, model, wanted.shares)
        changed = True
    if first != final:
        traffic.set_tracks(model, final)
        changed = True
    return changed


def share_as(traffic: Traffic, model: str, shares: Shares) -> None:
    """Set a model's shares."""
    traffic.set_shares(model, shares.candidate, shares.mirror, shares.sticky)


def is_shared(seen: Shares, wanted: Shares) -> bool:
    """Whether requests are shared as wanted; without a candidate it is no matter who sticks."""
    split = seen.candidate or wanted.candidate
    return (seen.candidate, seen.mirror) == (wanted.candidate, wanted.mirror) and (
        not split or seen.sticky == wanted.sticky
    )


def has_server(home: Path) -> bool:
    """Whether a serving process is ready on a state folder."""
    return (home / "serving" / "server.json").exists()


def server_address(home: Path) -> str:
    """Address of the admin listener.

    Raises:
        TransientError: no serving process is ready.
        ConfigurationError: its file says nothing.
    """
    file = home / "serving" / "server.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))["admin"]
    except FileNotFoundError as exc:
        raise TransientError(
            f"no serving process is ready: {file} is not there. Start one with `make serve`"
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigurationError(
            f"{file} does not say where the admin listener is; start the serving process anew"
        ) from exc
    return str(told if "//" in str(told) else f"http://{told}").rstrip("/")


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
    said = _sentence(answer)
    if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ConfigurationError(
            f"the server at {where} does not accept the token of its own state folder: {said}. "
            "Another process may listen there; start the serving process anew"
        )
    if answer.status_code == HTTPStatus.NOT_FOUND:
        raise NotServedError(f"the server at {where} has no such model or version: {said}")
    if answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise DataContractError(f"the server at {where} refused traffic of {model}: {said}")
    raise TracksRefusedError(f"the server at {where} could not set traffic of {model}: {said}")


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or f"status {answer.status_code}"


def _tracks(told: Any, model: str) -> Mapping[str, str | None]:
    tracks = told.get("slots") if isinstance(told, dict) else None
    if not isinstance(tracks, dict) or not set(TRACKS) <= tracks.keys():
        raise DataContractError(
            f"the server's answer about {model} names no tracks; it is of another release of this "
            "project"
        )
    return {track: None if tracks[track] is None else str(tracks[track]) for track in TRACKS}
