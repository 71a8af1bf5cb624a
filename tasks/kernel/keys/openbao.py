"""Keys in OpenBao: its engine `transit` signs and encrypts, and no private key leaves it.

See https://openbao.org/api-docs/secret/transit/; HashiCorp's Vault has the same engine. A policy
for the token of this needs no more than `POLICIES` of `infra.platform.openbao` gives it.
"""

import base64
import hashlib
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.kernel.errors import ConfigurationError, LostKeyError, TransientError
from tasks.kernel.keys.store import Signature, id_of

if TYPE_CHECKING:
    from hvac import Client

EXPECTED = "expected a token, or a role id and a secret id of an AppRole, and mode 600"
ABSENT = "not found", "no existing key"
"""In what `transit` answers where there is no such key."""


class RefusedError(ConfigurationError):
    """OpenBao answered that the request is wrong, or that there is nothing of that name."""


class NoKeyError(RefusedError):
    """`transit` answered that there is no such key."""


@dataclass(eq=False)
class OpenBao:
    """One OpenBao, asked over HTTP.

    Attributes:
        token_file: its owner's alone; one line, a token, or two, an AppRole's role id and secret
            id. It is read again where OpenBao refuses the token. None: asked without a token.
        ca: PEM of the authority that its certificate is of; None: one that this machine trusts.
    """

    url: str
    token_file: Path | None
    ca: Path | None = None
    timeout_s: float = 10
    _client: "Client | None" = None

    def ask(self, method: str, path: str, **data: Any) -> dict[str, Any]:
        """The answer to one request; empty where there is none.

        Args:
            path: behind `/v1/`.

        Raises:
            TransientError: it does not answer, is sealed or has no leader.
            RefusedError: the request is wrong, or there is nothing of that name.
            ConfigurationError: the token has no right to this or cannot be read, or the certificate
                is not trusted.
        """
        from hvac import exceptions
        from requests.exceptions import RequestException, SSLError

        was_new, bao = self._client is None, f"OpenBao at {self.url}"
        try:
            client = self._client = self._client or self._signed_in()
            answer = client.adapter.request(method, f"/v1/{path}", json=data or None)
        except OSError as exc:  # of requests, or of the authority's file
            if isinstance(exc, RequestException) and not isinstance(exc, SSLError):
                raise TransientError(f"{bao} is away: {type(exc).__name__}") from exc
            who = f"by {self.ca or 'an authority that is trusted here'}"
            raise ConfigurationError(f"{bao} is not certified {who}") from exc
        except (exceptions.Forbidden, exceptions.Unauthorized) as exc:
            self._client = None
            if not was_new:  # the token has ended: a new one may be had
                return self.ask(method, path, **data)
            raise ConfigurationError(
                f"{bao} refuses the token of {self.token_file} to {method} {path}; "
                "give it a policy that allows this, or name another file. Nothing was done"
            ) from exc
        except (exceptions.InvalidRequest, exceptions.InvalidPath) as exc:
            said = exc.args[0] or "there is nothing of that name"
            kind = NoKeyError if any(words in str(said) for words in ABSENT) else RefusedError
            raise kind(f"{bao} refuses to {method} {path}: {said}") from exc
        except exceptions.VaultError as exc:  # sealed, no leader, too many requests
            raise TransientError(f"{bao} is not ready: {exc}") from exc
        return answer if isinstance(answer, dict) else {}

    def _signed_in(self) -> "Client":
        import hvac
        import requests

        session, adapter = requests.Session(), requests.adapters.HTTPAdapter()
        adapter.init_poolmanager(4, 4, ssl_minimum_version=ssl.TLSVersion.TLSv1_3)
        session.mount("https://", adapter)
        session.trust_env = False  # no proxy and no other authority
        session.verify = str(self.ca) if self.ca else True
        client = hvac.Client(self.url, "", timeout=self.timeout_s, session=session)
        match _secrets(self.token_file) if self.token_file else []:
            case [token]:
                client.token = token
            case [role_id, secret_id]:
                client.auth.approle.login(role_id, secret_id)
        return client


@dataclass(eq=False)
class Trusted(Mapping[str, bytes]):
    """Public keys by their ids; OpenBao is asked again only for an id that is not known."""

    read: Callable[[], Mapping[int, bytes]]
    versions: Mapping[int, bytes] = field(default_factory=dict)

    def fresh(self) -> Mapping[int, bytes]:
        """As OpenBao has them now."""
        self.versions = self.read()
        return self.versions

    def __getitem__(self, key_id: str) -> bytes:
        if key_id not in map(id_of, self.versions.values()):
            self.fresh()
        return {id_of(pem): pem for pem in self.versions.values()}[key_id]

    def __iter__(self) -> Iterator[str]:
        known = [*map(id_of, self.versions.values())]
        yield from known  # who finds it among these asks for no more
        yield from (i for i in map(id_of, self.fresh().values()) if i not in known)

    def __len__(self) -> int:
        return len([*self])


@dataclass(eq=False)
class OpenBaoKeys:
    """Keys of one `transit` engine.

    Attributes:
        admin: whose token may destroy keys; None: nobody's here.
        mount: path of the engine.
    """

    bao: OpenBao
    admin: OpenBao | None = None
    mount: str = "transit"
    _trusted: dict[str, Trusted] = field(default_factory=dict)

    def sign(self, name: str, content: bytes) -> Signature:
        """See `KeyStore.sign`; what is sent is the digest of the content alone."""
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        data = {"input": digest, "prehashed": True, "hash_algorithm": "sha2-256"}
        answer = self._of_key("sign", name, **data, marshaling_algorithm="asn1")
        _, version, der = answer["data"]["signature"].split(":")
        known, number = self.public_keys(name), int(version.removeprefix("v"))
        pem = known.versions.get(number) or known.fresh()[number]
        return Signature(id_of(pem), base64.b64decode(der))

    def public_keys(self, name: str) -> Trusted:
        """See `KeyStore.public_keys`."""
        return self._trusted.setdefault(name, Trusted(lambda: self._read(name)))

    def encrypt(self, name: str, data_key: bytes) -> str:
        """See `KeyStore.encrypt`; the first use makes a key of AES-256-GCM."""
        plain = base64.b64encode(data_key).decode()
        answer = self.bao.ask("post", f"{self.mount}/encrypt/{name}", plaintext=plain)
        return str(answer["data"]["ciphertext"])

    def decrypt(self, name: str, encrypted: str) -> bytes:
        """See `KeyStore.decrypt`."""
        try:
            answer = self.bao.ask("post", f"{self.mount}/decrypt/{name}", ciphertext=encrypted)
        except RefusedError as exc:
            raise LostKeyError(
                f"the key {name!r} of OpenBao was destroyed, or another one encrypted this, or it "
                f"was changed ({exc}). It cannot be read, unless a snapshot of OpenBao has the key"
            ) from exc
        return base64.b64decode(answer["data"]["plaintext"])

    def rotate(self, name: str) -> None:
        """See `KeyStore.rotate`."""
        self._of_key("keys", f"{name}/rotate")

    def destroy(self, name: str) -> None:
        """See `KeyStore.destroy`; a destroyed key is not trusted any more either.

        Raises:
            ConfigurationError: this process has no token that may.
        """
        if self.admin is None:
            seen = f"the key {name!r} was not destroyed: FALAJ_KEYS_ADMIN_TOKEN_FILE is not set"
            raise ConfigurationError(f"{seen}; expected a file with an administrator's token")
        key = f"{self.mount}/keys/{name}"
        with suppress(NoKeyError):
            self.admin.ask("post", f"{key}/config", deletion_allowed=True)
            self.admin.ask("delete", key)
            self._trusted.pop(name, None)

    def _read(self, name: str) -> Mapping[int, bytes]:
        """PEM of each version, as OpenBao has them now; none where there is no such key."""
        try:
            found = self.bao.ask("get", f"{self.mount}/keys/{name}")["data"]["keys"]
        except RefusedError:
            return {}
        return {int(n): key["public_key"].encode() for n, key in found.items()}

    def _of_key(self, what: str, name: str, **data: Any) -> dict[str, Any]:
        """Ask for what a signing key does, which is made where there is none."""
        try:
            return self.bao.ask("post", f"{self.mount}/{what}/{name}", **data)
        except NoKeyError:
            self.bao.ask("post", f"{self.mount}/keys/{name.split('/')[0]}", type="ecdsa-p256")
            return self.bao.ask("post", f"{self.mount}/{what}/{name}", **data)


def _secrets(file: Path) -> list[str]:
    try:
        mode, found = file.stat().st_mode, file.read_text().split()
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}; {EXPECTED}") from exc
    if mode & 0o077 or len(found) not in (1, 2):
        seen = f"has {len(found)} words and mode {mode & 0o777:o}"
        raise ConfigurationError(f"{file} {seen}; {EXPECTED}. Nothing was asked")
    return found
