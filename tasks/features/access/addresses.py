"""Addresses of stores: which lie on this machine, and which would send secrets in the clear.

Sentences made here name hosts and options, never a user or a password.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

ENCRYPTED_POSTGRES = ("require", "verify-ca", "verify-full")


def is_loopback(host: str) -> bool:
    """True where `host` can only be this machine: `localhost`, 127.0.0.0/8 or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def postgres_refusal(url: str, place: str) -> Iterator[str]:
    """What is wrong with a PostgreSQL URL; nothing for any other kind of URL.

    The client's own default (`prefer`) falls back to clear text in silence, so the mode must be
    said.
    """
    if not url.startswith("postgres"):
        return
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    hosts = [parts.hostname or "", *options.get("host", [])]
    mode = options.get("sslmode", [""])[0]
    remote = [host for host in hosts if host and not is_loopback(host) and host[0] != "/"]
    if remote and mode not in ENCRYPTED_POSTGRES:
        yield (
            f"{place} connects to PostgreSQL on {remote[0]} with sslmode "
            f"{mode or 'unset'}, expected one of {', '.join(ENCRYPTED_POSTGRES)}: anything else "
            "sends the password and the data unencrypted. Only loopback may go without"
        )


def redis_parts(connection_string: str) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Hosts with ports, and options, of Feast's form `host:port,option=value,...`.

    Raises:
        ValueError: a part is neither, or no host is named.
    """
    parts = [part.strip() for part in connection_string.split(",")]
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    hosts = [part.rpartition(":") for part in parts if "=" not in part]
    if not hosts or not all(host and ":" not in host for host, _, _ in hosts):
        raise ValueError("no host:port")  # Feast splits at every colon, so it knows no IPv6
    return [(host, int(port)) for host, _, port in hosts], options


def redis_refusal(connection_string: str) -> Iterator[str]:
    """What is wrong with Feast's Redis connection string: `host:port,option=value,...`."""
    try:
        nodes, options = redis_parts(connection_string)
    except ValueError:
        yield (
            "online_store.connection_string is not host:port,option=value,... (Feast knows no IPv6 "
            "address here, and a password must hold no comma, which Feast splits it at)"
        )
        return
    known = {"ssl", "username", "password", "db", "socket_timeout", "socket_connect_timeout"}
    known |= {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"}
    known |= {"ssl_check_hostname", "health_check_interval", "skip_full_coverage_check"}
    if unknown := sorted(options.keys() - known):
        yield (
            f"online_store.connection_string has unknown option {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
    remote = [host for host, _ in nodes if not is_loopback(host)]
    if remote and options.get("ssl") != "true":
        yield (
            f"online_store connects to Redis on {remote[0]} without ssl=true, which sends the "
            "password and the features unencrypted. Only loopback may go without"
        )
    elif remote and options.get("ssl_cert_reqs", "required") != "required":
        yield f"online_store does not check the certificate of Redis on {remote[0]}"
    elif remote and not options.get("password"):
        yield f"online_store connects to Redis on {remote[0]} without a password"
