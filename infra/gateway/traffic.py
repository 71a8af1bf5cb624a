"""Who answers how much: shares of stable, candidate and shadow, changed while Envoy runs."""

from __future__ import annotations

import time
from pathlib import Path

from infra.gateway.admin import Admin
from infra.gateway.config import read_plan
from infra.gateway.prepare import prepared_folder, write_routes
from infra.gateway.shares import Shares, read_shares, write_shares
from infra.gateway.values import version_of
from tasks.kernel.errors import ConfigurationError, TransientError

LIMIT_S = 10.0
PAUSE_S = 0.02


class EdgeTraffic:
    """The traffic of the edge of one state folder.

    Args:
        home: the state folder.
        limit_s: how long a running Envoy may take to take new shares.
    """

    def __init__(self, home: Path, limit_s: float = LIMIT_S) -> None:
        self._home = home
        self._limit_s = limit_s

    def shares(self, model: str) -> Shares:
        """How a model's traffic is split.

        Raises:
            ConfigurationError: the edge lets no such model through.
        """
        plan = read_plan(self._home)
        _check(model, plan.config.models)
        return read_shares(plan.place.shares_file).get(model, Shares())

    def set_shares(self, model: str, candidate: float, mirror: float, sticky: bool = True) -> None:
        """Split a model's traffic anew; returns when Envoy does so.

        The shares are kept in any case, and hold when Envoy starts again.

        Args:
            candidate: share of the candidate, 0 to 1.
            mirror: share that is sent to the shadow too, 0 to 1.
            sticky: a client always meets the same version.

        Raises:
            ConfigurationError: the edge lets no such model through, or Envoy refused the routes.
            TransientError: Envoy does not run, or did not take them in time.
        """
        plan = read_plan(self._home)
        _check(model, plan.config.models)
        wanted = _shares(candidate, mirror, sticky)
        with prepared_folder(plan.place):
            known = dict(read_shares(plan.place.shares_file))
            write_shares(plan.place.shares_file, known | {model: wanted})
            content = write_routes(plan, known | {model: wanted})
            self._wait(Admin(plan.place.folder), version_of(content))

    def _in_force(self, admin: Admin) -> tuple[str, str]:
        try:
            return admin.version_of_routes()
        except TransientError as exc:
            raise TransientError(f"{exc}. The shares are kept, and hold when it starts") from exc

    def _wait(self, admin: Admin, version: str) -> None:
        deadline = time.monotonic() + self._limit_s
        while True:
            found, refused = self._in_force(admin)
            if found == version:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE_S)
        if refused:
            raise ConfigurationError(f"Envoy refused the new shares: {refused}")
        raise TransientError(
            f"Envoy has not taken the new shares within {self._limit_s:g} s; they are kept, and "
            "hold when it does or starts again"
        )


def _check(model: str, known: object) -> None:
    names = sorted(known) if isinstance(known, dict) else []
    if model not in names:
        raise ConfigurationError(
            f"the edge lets no model {model} through; it knows {', '.join(names)}. Add it to "
            "models in edge.yaml and run `python -m falaj gateway prepare`"
        )


def _shares(candidate: float, mirror: float, sticky: bool) -> Shares:
    try:
        return Shares(candidate=candidate, mirror=mirror, sticky=sticky)
    except ValueError as exc:
        raise ConfigurationError(
            f"shares are between 0 and 1; got candidate={candidate!r}, mirror={mirror!r}"
        ) from exc
