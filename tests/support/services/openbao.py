"""A real OpenBao, set up as the platform sets up its own, and a browser's part of a sign-in."""

from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.bench.processes import server
from infra.platform import openbao as platform
from tasks.kernel.errors import TransientError
from tasks.kernel.files import read_yaml, write_atomically
from tasks.kernel.keys.openbao import OpenBao
from tests.support.services.listeners import https_client

CALLBACK = "http://127.0.0.1:9/callback"
PASSWORD = "a long password"


@dataclass
class RunningOpenBao:
    """One that runs; people sign in with `PASSWORD` and are sent to `CALLBACK`."""

    home: Path
    url: str
    process: psutil.Process

    @property
    def files(self) -> platform.OpenBaoFiles:
        return platform.OpenBaoFiles(self.home)

    def program(self, name: str) -> OpenBao:
        """It, asked with the rights of a program."""
        return platform.program(self.home, name)

    def administrator(self, folder: Path) -> OpenBao:
        """It, asked with the token of a person who is an administrator."""
        self.add("administrator", "admin")
        write_atomically(folder / "token", self.sign_in("administrator"), private=True)
        return OpenBao(self.url, folder / "token", self.files.authority.certificate)

    def root(self, folder: Path) -> OpenBao:
        """It, asked with a new root token, which the recovery key makes."""
        asked = self._ask("put", "/v1/sys/generate-root/attempt")
        key = {"key": self.files.recovery.read_text().strip(), "nonce": asked["nonce"]}
        made = self._ask("put", "/v1/sys/generate-root/update", json=key)["encoded_token"]
        pairs = zip(b64decode(f"{made}=="), asked["otp"].encode(), strict=True)
        write_atomically(folder / "root", bytes(a ^ b for a, b in pairs), private=True)
        return OpenBao(self.url, folder / "root", self.files.authority.certificate)

    def add(self, name: str, *roles: str, tenant: str = "red", use_cases: str = "") -> None:
        """Add an account, or change it."""
        facts = {"tenant": tenant, "use_cases": use_cases}
        is_ours = tenant != "blue"
        bao = self.program("accounts")
        platform.add_account(bao, name, PASSWORD, roles, is_ours=is_ours, **facts)

    @property
    def oidc(self) -> dict[str, str]:
        """`issuer`, `client_id`, `client_secret`."""
        return read_yaml(self.files.oidc, "oidc.json")

    def sign_in(self, name: str) -> str:
        """OpenBao's own token of a person, as its page of sign-in keeps it."""
        answer = self._ask("post", f"/v1/auth/userpass/login/{name}", json={"password": PASSWORD})
        return str(answer["auth"]["client_token"])

    def tokens(self, name: str, token: str | None = None, redirect: str = CALLBACK) -> Any:
        """`id_token` and `access_token` of a person: the flow by authorization code, no browser.

        Raises:
            httpx.HTTPStatusError: it refuses.
        """
        who = self.oidc
        path = who["issuer"].removeprefix(self.url)
        query = {"response_type": "code", "scope": "openid falaj", "state": "s", "nonce": "n"}
        query |= {"client_id": who["client_id"], "redirect_uri": redirect}
        signed_in = {"X-Vault-Token": token or self.sign_in(name)}
        code = self._ask("get", f"{path}/authorize", params=query, headers=signed_in)["code"]
        asked = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect}
        client = (who["client_id"], who["client_secret"])
        return self._ask("post", f"{path}/token", data=asked, auth=client)

    def userinfo(self, access_token: str) -> Any:
        """What it says of the person who has this token now."""
        path = self.oidc["issuer"].removeprefix(self.url)
        bearer = {"Authorization": f"Bearer {access_token}"}
        return self._ask("get", f"{path}/userinfo", headers=bearer)

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        authority = self.files.authority.certificate
        with https_client(self.url, authority, trust_env=False) as client:
            return client.request(method, path, **more).raise_for_status().json()


@contextmanager
def openbao_server(home: Path) -> Iterator[RunningOpenBao]:
    """Start one on a free port, with its data in `home/openbao`, and set it up."""
    files = platform.OpenBaoFiles(home)

    def started(port: int) -> tuple[str, ...]:
        platform.prepare(files, "127.0.0.1", port, f"https://127.0.0.1:{port}")
        return platform.command(files)

    def answers(port: int) -> bool:
        with suppress(TransientError):
            platform.set_up(files, f"https://127.0.0.1:{port}", [CALLBACK])
            return platform.is_well(files)
        return False

    with server(started, answers, home / "openbao.log") as (port, process):
        yield RunningOpenBao(home, f"https://127.0.0.1:{port}", process)


@pytest.fixture(scope="session")
def openbao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOpenBao]:
    """One for all tests of a process; each names accounts and keys of its own."""
    with openbao_server(tmp_path_factory.mktemp("openbao")) as running:
        yield running
