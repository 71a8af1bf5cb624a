"""The guard of a process that only its own machine can reach: everybody may do everything.

A browser on this machine is part of it, and the pages that it shows are not. What such a page asks
names it in `Origin`, or, where the page's own name was pointed at this machine, in `Host`.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from types import MappingProxyType

from serving.config import ServingConfig
from serving.errors import ForbiddenError
from serving.interfaces import Action, Headers, Principal
from serving.security.config import is_loopback
from tasks.kernel.errors import ConfigurationError

_EVERYBODY = Principal(
    subject="",
    tenant="",
    roles=MappingProxyType({"*": frozenset({"infer", "read", "admin"})}),
    expires=math.inf,
)
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:@\[\]]+))(?::\d*)?")
"""A host, in brackets or not, and perhaps a port; RFC 3986, section 3.2, without a user."""


class OpenGuard:
    """Admits everybody. A web page of another site is no one: browsers name it in `Origin`."""

    def __init__(self, config: ServingConfig) -> None:
        """Refuse to stand before a listener that others can reach.

        Raises:
            ConfigurationError: it is not on loopback, or is not to be open.
        """
        if not config.on_loopback or not config.open_to_all:
            raise ConfigurationError(
                f"host={config.host} and open_to_all={config.open_to_all} need a guard that knows "
                "clients (section `security`); without one the server listens on 127.0.0.1 with "
                "open_to_all: true only. Nothing was started"
            )

    def recognise(self, headers: Headers, address: str) -> None:
        """Everybody, but for pages that a browser on this machine has from elsewhere.

        Raises:
            ForbiddenError: a page of another site asks.
        """
        self.admit(headers, address, "read", None)

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        """Everybody, but for pages that a browser on this machine has from elsewhere.

        Raises:
            ForbiddenError: a page of another site asks.
        """
        for name, value in headers:
            if (name == b"origin" and not _is_local(value.partition(b"://")[2])) or (
                name == b"host" and not _is_local(value)
            ):
                raise ForbiddenError(
                    "a page of another site may not use this server; it is open to this machine's "
                    "own programs"
                )
        return _EVERYBODY


@lru_cache(256)
def _is_local(authority: bytes) -> bool:
    host = _AUTHORITY.fullmatch(authority.decode("latin-1"))
    return host is not None and is_loopback(host[1] or host[2])
