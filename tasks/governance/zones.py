"""In which zone an address is, by patterns that the owner of the installation wrote."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import normpath
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from tasks.kernel.values import is_loopback

UNKNOWN = "unknown"
NAMED = ("pool", "hosts")
"""Beginnings of what is named and has no network address: a work pool, hosts that are found."""
_HERE = ("package", "tenant")
_LOCAL = ("", "file", "sqlite", "delta+file", "iceberg+file")


class End(NamedTuple):
    """One end of an address: where bytes arrive."""

    scheme: str
    host: str
    path: str

    def __str__(self) -> str:
        """For people and records: without user, password, query, or a path that may be secret."""
        if self.scheme in NAMED:
            return f"{self.scheme}:{self.host}"
        path = "" if self.scheme.startswith(("http", "mailto")) else self.path
        return f"{self.scheme}://{self.host}{path}" if self.scheme else self.host


def ends_of(address: str) -> list[End]:
    """All hosts and folders that an address names; one without a name where it is none.

    An address of PostgreSQL may name several hosts, and one after `?host=` counts instead of them;
    one of Redis lists them with commas; one of e-mail names a server and those who get it.
    """
    scheme, _, rest = address.partition(":")
    if scheme in NAMED:
        return [End(scheme, rest, "")]
    if "://" not in address:
        if address.startswith(("/", "file:")):
            return [End("file", "", address.removeprefix("file:"))]
        parts = [part for part in address.split(",") if "=" not in part]
        return [End("", _host(part.rpartition("@")[2]), "") for part in parts or [""]]
    try:
        found = urlsplit(address)
    except ValueError:
        return [End(scheme, "", "")]
    if "\\" in address:  # what clients make of it differs
        return [End(scheme, "", "")]
    query, path = dict(parse_qsl(found.query)), unquote(found.path)
    hosts = found.netloc.rpartition("@")[2].split(",")
    if found.scheme.startswith("postgres"):
        named = [query[name] for name in ("host", "hostaddr", "service") if name in query]
        hosts = [host for text in named for host in text.split(",")] or hosts
        hosts = ["localhost" if not host or host.startswith("/") else host for host in hosts]
    if found.scheme.startswith("mailto"):
        given = [value for _, value in parse_qsl(found.query) if "@" in value] + [path.strip("/")]
        mails = [mail for text in given for mail in re.split("[,;]", text) if mail]
        hosts += [mail.rpartition("@")[2] for mail in mails]
    return [End(found.scheme, _host(host), normpath(path) if path else "") for host in hosts]


def _host(text: str) -> str:
    """Host of `host:port`, in small letters."""
    if text.startswith("["):
        return text[1:].partition("]")[0].lower()
    return (text if text.count(":") > 1 else text.partition(":")[0]).rstrip(".").lower()


def fits(pattern: str, end: End) -> bool:
    """Whether a pattern is of an end.

    A pattern of a host, such as `*.example.ae`, is of every protocol. One with a scheme, such as
    `s3://bucket/prefix`, is of that scheme, the host and what is below the path.
    """
    if "://" not in pattern and not pattern.startswith(("/", *(f"{name}:" for name in NAMED))):
        is_host = bool(end.host) and end.scheme not in NAMED
        return is_host and fnmatchcase(end.host, pattern.lower())
    (wanted,) = ends_of(pattern)[:1]
    below = end.path == wanted.path or end.path.startswith(f"{wanted.path.rstrip('/')}/")
    return wanted.scheme == end.scheme and fnmatchcase(end.host, wanted.host) and below


def zone_of(end: End, zones: Mapping[str, str], own: str | None, folders: tuple[Path, ...]) -> str:
    """Zone of an end: of the first pattern that fits; else `own`, if it is here; else unknown.

    Args:
        end: of an address.
        zones: pattern to zone.
        own: zone of this machine: of loopback, of its tenants, and of what is in `folders`.
        folders: the state folder and the project; links in paths are followed.
    """
    is_here = end.scheme in _HERE or (end.scheme not in NAMED and is_loopback(end.host))
    if end.scheme in _LOCAL and not end.host:
        path = (folders[-1] / end.path).resolve()
        is_here = bool(end.path) and any(path.is_relative_to(f.resolve()) for f in folders)
        end = End("file", "", str(path) if end.path else "")
    fitting = (zone for pattern, zone in zones.items() if fits(pattern, end))
    return next(fitting, own if own and is_here else UNKNOWN)
