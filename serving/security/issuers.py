"""Keys of an issuer of tokens: read at start, and again when one is unknown or they are old."""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from serving.security.config import ISSUER_TIMEOUT_S, IssuerConfig
from tasks.kernel.errors import ConfigurationError

LOGGER = logging.getLogger(__name__)

MAX_BYTES = 2**20
MIN_SECRET_BYTES = 32
MIN_RSA_BITS = 2048
MIN_REFRESH_S = 10.0
"""Unknown keys make them be read again at most so often."""
Keys = Mapping[str, jwt.PyJWK]


class KeySource:
    """Public keys of one issuer by their id.

    A file is read where it stands; a URL in a thread, so that no caller waits.

    Args:
        on_change: called when keys were read, in whatever thread read them.

    Raises:
        ConfigurationError: a file holds no keys. An issuer that does not answer is tried again.
    """

    def __init__(self, config: IssuerConfig, on_change: Callable[[], None]) -> None:
        self._config = config
        self._on_change = on_change
        self._lock = threading.Lock()
        self._tried = time.monotonic()
        self._keys: Keys = {}
        if config.is_remote:
            self._read()
        else:
            self._keys = _read_file(config)

    def find(self, name: str | None) -> jwt.PyJWK | None:
        """The key of this id, or the only one where a token names none; None where unknown."""
        keys = self._keys
        if name is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(name)

    def refresh(self, is_unknown: bool) -> None:
        """Read the keys again if they are old, or one of them is unknown, but not too often."""
        now = time.monotonic()
        wait = MIN_REFRESH_S if is_unknown else self._config.refresh_s
        if now - self._tried < wait:
            return
        self._tried = now
        if not self._config.is_remote:
            self._read()
        elif self._lock.acquire(blocking=False):
            threading.Thread(target=self._read_in_thread, daemon=True, name="issuer-keys").start()

    def _read_in_thread(self) -> None:
        try:
            self._read()
        finally:
            self._lock.release()

    def _read(self) -> None:
        """Take the keys as they are now; where they cannot be read, they stay as they were."""
        config = self._config
        try:
            is_remote = config.is_remote
            keys = _parse(_fetch(config), str(config.keys)) if is_remote else _read_file(config)
        except (OSError, http.client.HTTPException, ConfigurationError) as exc:
            LOGGER.warning("keys of %s were not read: %s", config.issuer, exc)
            return
        if [(n, k._jwk_data) for n, k in keys.items()] != [
            (n, k._jwk_data) for n, k in self._keys.items()
        ]:
            self._keys = keys
            self._on_change()


def _read_file(config: IssuerConfig) -> Keys:
    if config.secret_file is not None:
        return {"": _shared_secret(config.secret_file)}
    file = Path(str(config.keys))
    try:
        return _parse(file.read_bytes(), str(file))
    except OSError as exc:
        raise ConfigurationError(f"keys {file} cannot be read: {exc.strerror}") from exc


def _shared_secret(file: Path) -> jwt.PyJWK:
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigurationError(f"{file} may be read by others than its owner; chmod 600")
        secret = file.read_bytes().strip()
    except OSError as exc:
        raise ConfigurationError(f"secret {file} cannot be read: {exc.strerror}") from exc
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"{file} holds {len(secret)} bytes; a shared secret needs {MIN_SECRET_BYTES}"
        )
    encoded = jwt.utils.base64url_encode(secret).decode()
    return jwt.PyJWK({"kty": "oct", "k": encoded, "alg": "HS256"}, algorithm="HS256")


def _fetch(config: IssuerConfig) -> bytes:
    url = str(config.keys)
    how: urllib.request.BaseHandler = urllib.request.ProxyHandler({})  # loopback needs no proxy
    if url.startswith("https:"):
        context = ssl.create_default_context(cafile=config.ca_file)
        how = urllib.request.HTTPSHandler(context=context)
    opener = urllib.request.build_opener(_NoRedirect(), how)
    with opener.open(url, timeout=ISSUER_TIMEOUT_S) as answer:
        content: bytes = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"{url} answered with more than {MAX_BYTES} bytes")
    return content


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Keys come from the address that was configured, and from no other."""

    def redirect_request(self, *arguments: Any, **_: Any) -> None:
        raise urllib.error.URLError("the issuer sends elsewhere for its keys; name that address")


def _parse(content: bytes, where: str) -> Keys:
    """Keys that sign; what this server cannot use is left out, secrets are refused.

    Raises:
        ConfigurationError: it is no key set, or one with keys that are no public ones.
    """
    try:
        entries = json.loads(content)["keys"]
        usable = [e for e in entries if e.get("use", "sig") == "sig"]
        if any(e.get("kty") == "oct" or "d" in e for e in usable):
            raise ConfigurationError(f"{where} holds secret keys; expected public ones only")
        found = {str(e.get("kid", "")): _key(e) for e in usable}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigurationError(f"{where} is no JSON Web Key Set: {exc!r}") from exc
    keys = {name: key for name, key in found.items() if key is not None}
    if not keys:
        raise ConfigurationError(f"{where} holds no key that signs tokens")
    return keys


def _key(entry: dict[str, Any]) -> jwt.PyJWK | None:
    try:
        key = jwt.PyJWK(entry)
    except jwt.PyJWTError:
        return None  # a kind of key that nobody here can check
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        LOGGER.warning("RSA key %s has less than %d bits and is not used", key.key_id, MIN_RSA_BITS)
        return None
    return key
