"""Commands of the gateway, API keys and certificates.

A key is printed once, alone on standard output.
"""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from falaj.context import EXIT_FAILED, EXIT_NOT_RUNNING, DryRun, Here, Shown
from infra.gateway.config import GatewayConfig, Shares, read_plan, read_shares
from serving.security.keys import ApiKey, create_key, read_keys, revoke_key
from tasks.kernel.errors import ConfigurationError

app = App(name="gateway")
Model = Annotated[str | None, Parameter(help="Model of edge.yaml (default: all).")]
Share = Annotated[float | None, Parameter(help="Share of the requests, 0 to 1.")]


@app.command
def prepare(*, context: Here) -> Shown:
    """Write what Envoy reads, and certificates; a running Envoy takes what has changed.

    Examples:
        falaj gateway prepare
    """
    from infra.gateway.prepare import PUBLIC
    from infra.gateway.prepare import prepare as write
    from infra.gateway.rendering import public_pair
    from serving.security.certificates import expires_at

    plan = read_plan(context.home)
    write(plan)
    pair, place = public_pair(plan), plan.files
    until = expires_at(pair.certificate)
    lines = [
        f"prepared in {place.folder}",
        f"clients see    {pair.certificate} until {until:%Y-%m-%d}",
    ]
    if plan.config.certificate is None:
        lines.append(f"clients trust  {place.certificates / f'{PUBLIC}.pem'}")
    lines.append(f"server's part  {place.server_security_file}")
    if not place.security_file.exists():
        file = place.security_file
        lines.append(f"nobody has access yet: {file} has to name issuers or api_keys")
    return Shown({"folder": place.folder, "certificate": pair.certificate, "until": until}, lines)


@app.command
def run(*, context: Here) -> int:
    """Prepare, then run Envoy in the foreground; SIGTERM ends it in order.

    Examples:
        falaj gateway run
    """
    from infra.gateway.envoy import run_envoy
    from infra.gateway.prepare import prepare as write

    plan = read_plan(context.home)
    write(plan)
    return run_envoy(plan)


@app.command
def check(*, context: Here) -> Shown:
    """Check the configuration, and change nothing that runs.

    Examples:
        falaj gateway check
    """
    from infra.gateway.envoy import check_bootstrap
    from infra.gateway.prepare import prepare as write

    plan = read_plan(context.home)
    write(plan)
    fault = check_bootstrap(plan)
    if fault:
        sys.stderr.write(f"Envoy refuses the configuration: {fault}\n")
        return Shown({"fault": fault}, code=EXIT_FAILED)
    taken = "Envoy takes its first file; `status` shows whether a running one took the others"
    return Shown({"fault": None}, [taken])


@app.command
def status(*, context: Here) -> Shown:
    """Show what runs, the shares, and what Envoy refused; exit code 3 where it is down.

    Examples:
        falaj gateway status
    """
    from infra.gateway.envoy import Admin

    plan = read_plan(context.home)
    admin = Admin(plan.files.folder)
    ready = admin.is_ready()
    refused = admin.refusals() if ready else []
    kept = read_shares(plan.files.shares_file)
    found = {name: kept.get(name, Shares()) for name in plan.config.models}
    lines = [
        f"gateway        {'up' if ready else 'down'}, {plan.config.listen}",
        *(f"refused        {fault}" for fault in refused),
        *(_line(name, share) for name, share in found.items()),
    ]
    code = EXIT_FAILED if refused else 0 if ready else EXIT_NOT_RUNNING
    return Shown({"ready": ready, "refused": refused, "shares": found}, lines, code)


@app.command
def shares(
    model: Model = None,
    /,
    *,
    candidate: Share = None,
    mirror: Share = None,
    random: bool = False,
    context: Here,
) -> Shown:
    """Show the shares of traffic, or set them.

    Args:
        model: Model of edge.yaml (default: all).
        candidate: Share that the candidate answers, 0 to 1.
        mirror: Share copied to the shadow version too, 0 to 1.
        random: Draw each request independently.

    Examples:
        falaj gateway shares
        falaj gateway shares flight-delay --candidate 0.1 --mirror 0.5
    """
    from infra.gateway.prepare import GatewayTraffic

    plan = read_plan(context.home)
    traffic = GatewayTraffic(plan.files.home)
    if model and (candidate is not None or mirror is not None):
        now = traffic.shares(model)
        traffic.set_shares(
            model,
            now.candidate if candidate is None else candidate,
            now.mirror if mirror is None else mirror,
            sticky=not random,
        )
    names = [model] if model else sorted(plan.config.models)
    found = {name: traffic.shares(name) for name in names}
    return Shown(found, [_line(name, share) for name, share in found.items()])


@app.command
def settings() -> Shown:
    """Show all settings of edge/edge.yaml with their defaults and what they mean: a JSON schema.

    Examples:
        falaj gateway settings
    """
    schema = GatewayConfig.model_json_schema()
    return Shown(schema, [json.dumps(schema, indent=1)])


def _line(name: str, shares: Shares) -> str:
    how = "sticky" if shares.sticky else "drawn for each request"
    return f"{name:<20} candidate {shares.candidate:.2%}, mirror {shares.mirror:.2%}, {how}"


KEYS = Path("serving") / "secrets" / "api-keys.json"
CERTIFICATES = Path("serving") / "secrets" / "tls"
File = Annotated[Path | None, Parameter(help=f"Of keys (default: {KEYS} in the state folder).")]
keys = App(name="keys")


@keys.command
def create(
    *,
    subject: str,
    role: list[str],
    tenant: str = "",
    days: Annotated[float | None, Parameter(validator=Number(gt=0, lte=36_500))] = None,
    file: File = None,
    context: Here,
) -> Shown:
    """Create a key, and print it once.

    Args:
        subject: Who uses it.
        role: Action and model, as infer:flight-delay or read:*; may be repeated.
        tenant: The key has no access to models of other tenants (default: an operator's key, with
            access to whatever its roles name).
        days: How long it is valid, a century at most (default: for ever).
        file: Of keys (default: serving/secrets/api-keys.json in the state folder).

    Examples:
        falaj keys create --subject shop --role infer:flight-delay --days 90
    """
    if not subject.strip():
        raise ConfigurationError("--subject is empty; name who uses the key. No key was made")
    expires = datetime.now(UTC) + timedelta(days=days) if days else None
    grants = tuple(map(_grant, role))
    text, key = create_key(file or context.home / KEYS, subject, grants, tenant, expires)
    sys.stderr.write(f"key {key.id} for {key.subject}; it is not shown again\n")
    return Shown({"id": key.id, "subject": key.subject, "key": text}, [text])


def _grant(text: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from serving.security.config import Grant

    try:
        return TypeAdapter(Grant).validate_python(text)
    except ValidationError as exc:
        raise ConfigurationError(
            f"{text!r} is no role; write infer, read or admin, a colon, and a model or *, as "
            "infer:flight-delay. No key was made"
        ) from exc


@keys.command(name="list")
def list_keys(*, file: File = None, context: Here) -> Shown:
    """List all keys.

    Examples:
        falaj keys list
    """
    now = datetime.now(UTC)
    found = read_keys(file or context.home / KEYS)
    facts = [_facts(key, now) for key in found]
    lines = [
        f"{key.id}  {key.state(now):<8}"
        f"{f'until {key.expires:%Y-%m-%d}' if key.expires else 'for ever':<18}"
        f"{key.subject:<20}{key.tenant or '-':<12}{' '.join(key.grants)}"
        for key in found
    ]
    return Shown(facts, lines or ["There is no key; `python -m falaj keys create` makes one."])


def _facts(key: ApiKey, now: datetime) -> dict[str, object]:
    shown = key.model_dump(include={"id", "subject", "tenant", "grants", "expires"})
    return {**shown, "state": key.state(now)}


@keys.command
def revoke(id: str, /, *, file: File = None, dry_run: DryRun = False, context: Here) -> Shown:
    """Revoke a key: it is refused within a second.

    Args:
        id: As `list` shows it.
        file: Of keys (default: serving/secrets/api-keys.json in the state folder).

    Examples:
        falaj keys revoke 3f2a91c4 --dry-run
    """
    now, path = datetime.now(UTC), file or context.home / KEYS
    if dry_run:
        key = next((key for key in read_keys(path) if key.id == id), None)
        if key is None:
            raise ConfigurationError(f"{path} holds no key {id}. Nothing was changed")
        would = f"key {key.id} of {key.subject} would be refused. Nothing was changed"
        return Shown(_facts(key, now), [would])
    key = revoke_key(path, id)
    return Shown(_facts(key, now), [f"key {key.id} of {key.subject} is refused from now on"])


def certificates(*, host: list[str], context: Here) -> Shown:
    """Issue a certificate of a private authority.

    Args:
        host: Name or address of clients; may be repeated.

    Examples:
        falaj certificates --host localhost
    """
    from serving.security.certificates import ensure_authority, ensure_certificate, expires_at

    folder = context.home / CERTIFICATES
    authority = ensure_authority(folder, "authority")
    pair = ensure_certificate(folder, "server", authority, host, "server")
    until = expires_at(pair.certificate)
    lines = [
        f"certificate  {pair.certificate} (until {until:%Y-%m-%d})",
        f"key          {pair.key}",
        f"authority    {authority.certificate}; clients trust this one",
    ]
    files = {"certificate": pair.certificate, "key": pair.key}
    return Shown({**files, "until": until, "authority": authority.certificate}, lines)
