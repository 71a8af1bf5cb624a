"""Commands of services: the platform and what is deployed to it, servers, the gateway, keys.

A key is printed once, alone on standard output.
"""

import json
import os
import re
import secrets
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import yaml
from cyclopts import App, Parameter
from cyclopts.validators import Number

from falaj.context import EXIT_FAILED, EXIT_NOT_RUNNING, Context, DryRun, Here, Shown, acting
from infra.gateway.config import GatewayConfig, Shares, announced_servers, read_plan, read_shares
from infra.platform.config import CONFIG_VARIABLE, SERVING, kept_options, read_config
from infra.platform.files import PlatformFiles, platform_environment
from serving.security.config import GRANT, KEYS_FILE
from serving.security.keys import ApiKey, create_key, read_keys, revoke_key
from tasks.governance.handling import Placement, addresses
from tasks.governance.identity import read_sign_in, switch
from tasks.governance.policy import WORK, require_placements
from tasks.kernel.errors import ConfigurationError, FalajError, NotRunningError
from tasks.kernel.extras import require_extras
from tasks.kernel.keys.address import own_openbao
from tasks.kernel.tenants import read_tenants

Count = Annotated[int | None, Parameter(validator=Number(gte=1))]


def up(
    *,
    config: Path | None = None,
    profile: Literal["embedded", "server"] | None = None,
    host: str | None = None,
    port: int | None = None,
    mlflow_port: int | None = None,
    serving_port: int | None = None,
    serving_grpc_port: int | None = None,
    serving: Annotated[bool | None, Parameter(negative="--no-serving")] = None,
    serving_replicas: Count = None,
    password: Annotated[bool | None, Parameter(negative="--no-password")] = None,
    reset: bool = False,
    deploying: Annotated[str | None, Parameter(show=False)] = None,
    context: Here,
) -> Shown:
    """Start the platform and deploy; harmless where it runs.

    Options are kept for later starts; `status` shows them.

    Args:
        config: YAML file (default: FALAJ_PLATFORM_CONFIG, or none).
        profile: Where its databases are.
        host: IP address to listen on (default: 127.0.0.1).
        port: Prefect's port (default: 4200; 0: any free).
        mlflow_port: MLflow's port (default: 5000; 0: any free).
        serving_port: The inference server's port (default: 8000).
        serving_grpc_port: Its port of gRPC (default: 8001).
        serving: Serve models too.
        serving_replicas: So many serving processes (default: 1).
        password: Protect Prefect and MLflow with a password.
        reset: Drop the options of earlier starts.
        deploying: for tests.

    Examples:
        falaj up
        falaj up --port 4300 --no-serving
    """
    from infra.platform.health import read_status
    from infra.platform.lifecycle import bring_up

    require_extras("platform", *([] if serving is False else ["serve"]))
    files = platform_files(context)
    chosen = config or os.environ.get(CONFIG_VARIABLE)
    given: dict[str, object] = {
        "profile": profile,
        "host": host,
        "port": port,
        "mlflow_port": mlflow_port,
        "serving_port": serving_port,
        "serving_grpc_port": serving_grpc_port,
        "serving": serving,
        "password": password,
        "deploying": deploying,
    }
    kept = {} if reset else kept_options(files)
    if serving_replicas:
        given |= _fixed(serving_replicas, **kept.get("scaling", {}))
    full = read_config(Path(chosen) if chosen else None, given, kept)
    require_placements(context.settings, addresses(full, os.environ))
    if full.openbao:
        require_extras("server")
    # The supervisor outlives this command, and with it the command's folder of temporary files.
    environment = {**os.environ, "TMPDIR": str(Path(tempfile.gettempdir()).parent)}
    try:
        bring_up(files, full, environment)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(
            str(exc)
            or "interrupted; the supervisor runs on: make status shows it, make down ends it"
        ) from exc
    return Shown(read_status(files) if context.as_json else None)


def down(
    *, now: bool = False, limit: float | None = None, dry_run: DryRun = False, context: Here
) -> Shown:
    """Let runs end, then stop the platform.

    Args:
        now: Wait for no run; mark what is cut off.
        limit: Seconds to wait for runs.

    Examples:
        falaj down --dry-run
        falaj down --limit 60
    """
    from infra.platform.health import read_status
    from infra.platform.lifecycle import bring_down, running_here

    files = platform_files(context)
    if dry_run:
        services, runs = running_here(files)
        lines = [
            f"would end     {', '.join(services) or 'nothing: no platform runs'}",
            *(f"{'would cut off' if now else 'waits for':<14}{run}" for run in runs),
            "Nothing was changed",
        ]
        return Shown({"services": services, "runs": runs}, lines)
    try:
        bring_down(files, at_once=now, limit_s=limit)
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(str(exc) or "interrupted; the platform runs on as before") from exc
    return Shown(read_status(files) if context.as_json else None)


def doctor(*, context: Here) -> Shown:
    """Find what is wrong with the platform, and what to do; exit code 1 where something is.

    Examples:
        falaj doctor
    """
    from infra.platform.health import examine, exit_code, report

    findings = examine(platform_files(context), os.environ)
    return Shown(findings, report(findings).splitlines(), exit_code(findings))


def logs(service: str = "supervisor", /, *, lines: int = 50, context: Here) -> Shown:
    """Show the last lines of a service's log.

    Args:
        service: As `status` names it.
        lines: How many.

    Examples:
        falaj logs prefect --lines 100
    """
    from infra.platform.lifecycle import log_lines

    found = log_lines(platform_files(context), service, lines)
    return Shown({"service": service, "lines": found}, found)


def worker(pool: str, /, *, context: Here) -> None:
    """Take work of a platform on another machine, whose state this one shares.

    PREFECT_API_URL names the platform, FALAJ_STATE and FALAJ_DATABASE_URL its state.

    Args:
        pool: Work pool, such as cpu.

    Examples:
        falaj worker cpu
    """
    from infra.platform.services import become_worker

    require_placements(context.settings, [Placement(WORK, f"pool:{pool}", "worker")])
    become_worker(pool, context.settings, os.environ)


def supervise(*, context: Here) -> None:
    """Be the supervisor, in the foreground (for an init system).

    Examples:
        falaj supervise
    """
    from infra.platform.services import supervise as run_supervisor

    run_supervisor(platform_files(context))


def deploy(
    *,
    check: Annotated[bool, Parameter(name=["--check", "--dry-run"])] = False,
    pools: Literal["process", "kubernetes"] = "process",
    wait: float = 0,
    file: Path | None = None,
    resume: bool = False,
    prune: bool = False,
    context: Here,
) -> Shown:
    """Write what differs from the files, leave equal things alone, and read all back.

    The use cases are those of --project, which may be repeated as PATH[=PATH_ON_WORKERS]; the first
    has plain deployment names. Without it: FALAJ_FEATURE_REPOS, separated by colons, or the one of
    FALAJ_FEATURE_REPO. Exit code 1 where something differs.

    Args:
        check: Only compare; changes nothing.
        pools: Kind of work pools.
        wait: Seconds, for a server that is starting; the files are read meanwhile.
        file: Instead of prefect.yaml.
        resume: Switch on again what people have paused.
        prune: Remove deployments and automations of ours that the files no longer have.

    Examples:
        falaj deploy --dry-run
        falaj deploy --project feature_repo/flights --project feature_repo/traffic
    """
    if not os.environ.get("PREFECT_API_URL"):  # Prefect reads it when it is imported
        environment = platform_environment(context.home)
        if environment is None:
            raise NotRunningError(
                "no platform runs on this state folder and PREFECT_API_URL is not set; start one "
                "with `make up`, or name a server. Nothing was deployed"
            )
        os.environ.update(environment)
    require_placements(context.settings)
    from infra.deploying.deploy import make_plan, run
    from infra.deploying.file import PREFECT_FILE

    plan = make_plan(context.repos, file=file or PREFECT_FILE, pool_type=pools, resume=resume)
    outcome = run(plan, wait, only_check=check, prune=prune)
    columns = {"written": outcome.written, "differs": outcome.differences}
    columns["note"] = sorted(set(outcome.notes))
    lines = [f"{name:<11}{line}" for name, found in columns.items() for line in found]
    lines.append(
        f"{len(outcome.equal)} as the files say, {len(outcome.written)} written, "
        f"{len(outcome.differences)} differences"
    )
    facts = {**columns, "equal": outcome.equal}
    return Shown(facts, lines, EXIT_FAILED if outcome.differences else 0)


def manifests(*, config: Path | None = None, namespace: str = "falaj", context: Here) -> Shown:
    """Print what scales serving and workers in a Kubernetes cluster, by the rules of `scaling`.

    Args:
        config: YAML file (default: the platform's options).
        namespace: Of the cluster.

    Examples:
        falaj manifests --config server.yaml
    """
    from infra.platform.scaling import manifests as made

    rules = read_config(config, {}, kept_options(platform_files(context))).scaling
    found = made(rules, namespace)
    return Shown(found, yaml.safe_dump_all(found, sort_keys=False).splitlines())


serve = App(name="serve")
Port = Annotated[int | None, Parameter(help="0 takes a free one (default: of serving.yaml).")]


@serve.default
def _serve(
    *,
    host: str | None = None,
    http_port: Port = None,
    grpc_port: Port = None,
    admin_port: Port = None,
    no_grpc: bool = False,
    replicas: Count = None,
    context: Here,
) -> None:
    """Serve the promoted models until SIGTERM; the addresses are printed.

    Args:
        host: Address that HTTP and gRPC listen on (default: of serving.yaml).
        no_grpc: HTTP only.
        replicas: So many processes, started again when they end; a gateway finds them by itself
            (default: this process alone).

    Examples:
        falaj serve
        falaj serve --http-port 8100 --no-grpc
    """
    require_extras("serve")
    options: dict[str, object] = {
        "--host": host,
        "--http-port": http_port,
        "--grpc-port": grpc_port,
        "--admin-port": admin_port,
    }
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    if replicas is None:
        _become_server(context, "serve", *words, *(["--no-grpc"] if no_grpc else []))
    elif host or admin_port or no_grpc:
        reason = "--replicas goes with ports of HTTP and gRPC alone; serving.yaml can say the rest"
        raise ConfigurationError(f"{reason}. Nothing was started")
    else:
        from infra.platform.services import supervise_serving

        asked = {"serving_port": http_port, "serving_grpc_port": grpc_port}
        supervise_serving(context.home, read_config(None, {**asked, **_fixed(replicas)}))


@serve.command(name="status")
def _serve_status(*, context: Here) -> None:
    """Show what serves from the state folder; exit code 3 where nothing does.

    Examples:
        falaj serve status
    """
    _become_server(context, "status")


@serve.command(name="stop")
def _serve_stop(*, timeout_s: float = 60, context: Here) -> None:
    """End the server, its requests answered.

    Args:
        timeout_s: How long to wait for the end.

    Examples:
        falaj serve stop --timeout-s 10
    """
    _become_server(context, "stop", f"--timeout-s={timeout_s:g}")


def _fixed(replicas: int, **others: object) -> dict[str, object]:
    return {"scaling": {**others, SERVING: {"least": replicas, "most": replicas}}}


@serve.command(name="replace")
def _serve_replace(*, timeout_s: float = 600, context: Here) -> Shown:
    """Replace the serving processes one by one, for new code or settings; nobody is refused.

    Args:
        timeout_s: How long to wait until all are replaced.

    Examples:
        falaj serve replace
    """
    from infra.platform.services import replace_serving

    number = replace_serving(context.home, timeout_s)
    return Shown({"replaced": number}, [f"{number} serving processes were replaced"])


@serve.command(name="settings")
def _serve_settings(*, context: Here) -> None:
    """Print the JSON schemas of serving.yaml and of the security file.

    Examples:
        falaj serve settings
    """
    _become_server(context, "settings")


def _become_server(context: Context, *words: str) -> None:
    """Go on as `python -m serving`, the process that the platform starts too."""
    os.environ["FALAJ_HOME"] = str(context.home)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "serving", *words])


def platform_files(context: Context) -> PlatformFiles:
    """The platform's files.

    Raises:
        ConfigurationError: the state folder, or one above it, is no folder or closed to this user.
    """
    home = context.home
    existing = next(folder for folder in (home, *home.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.X_OK):
        what = "may not be read by this user" if existing.is_dir() else "is no folder"
        raise ConfigurationError(
            f"{existing} {what}, so {home} cannot be the state folder; name another one with "
            "FALAJ_HOME or --home"
        )
    return PlatformFiles(home)


gateway = App(name="gateway")
Model = Annotated[str | None, Parameter(help="Model of edge.yaml (default: all).")]
Share = Annotated[float | None, Parameter(help="Share of the requests, 0 to 1.")]


@gateway.command
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
    require_placements(context.settings, addresses(plan.config, os.environ))
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


@gateway.command
def run(*, context: Here) -> int:
    """Prepare, then run Envoy in the foreground; SIGTERM ends it in order.

    Examples:
        falaj gateway run
    """
    from infra.gateway.envoy import run_envoy
    from infra.gateway.prepare import prepare as write

    plan = read_plan(context.home)
    require_placements(context.settings, addresses(plan.config, os.environ))
    write(plan)

    def follow() -> None:
        nonlocal plan
        try:
            if announced_servers(context.home) != plan.announced:
                plan = read_plan(context.home)
                write(plan)
        except FalajError as exc:  # what runs goes on, and it is tried again
            sys.stderr.write(f"the serving processes are not followed: {exc}\n")

    return run_envoy(plan, follow)


@gateway.command
def authorizer(*, context: Here) -> None:
    """Be the authorizer of the listener `platform`; the platform starts it itself.

    Examples:
        falaj gateway authorizer
    """
    from infra.gateway.authorizer import run_authorizer
    from infra.gateway.config import GatewayFiles

    run_authorizer(context.home, GatewayFiles(context.home).folder)


@gateway.command
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


@gateway.command
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


@gateway.command
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
        candidate = now.candidate if candidate is None else candidate
        mirror = now.mirror if mirror is None else mirror
        traffic.set_shares(model, candidate, mirror, sticky=not random)
    names = [model] if model else sorted(plan.config.models)
    found = {name: traffic.shares(name) for name in names}
    return Shown(found, [_line(name, share) for name, share in found.items()])


@gateway.command
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


CERTIFICATES = Path("serving") / "secrets" / "tls"
File = Annotated[
    Path | None, Parameter(help=f"Of keys (default: {KEYS_FILE} in the state folder).")
]
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
    if wrong := [text for text in role if not re.fullmatch(GRANT, text)]:
        raise ConfigurationError(
            f"{wrong[0]!r} is no role; write infer, read or admin, a colon, and a model or *, as "
            "infer:flight-delay. No key was made"
        )
    expires = datetime.now(UTC) + timedelta(days=days) if days else None
    text, key = create_key(file or context.home / KEYS_FILE, subject, tuple(role), tenant, expires)
    context.subject.update(key=key.id, subject=key.subject, tenant=tenant, grants=role)
    sys.stderr.write(f"key {key.id} for {key.subject}; it is not shown again\n")
    return Shown({"id": key.id, "subject": key.subject, "key": text}, [text])


@keys.command(name="list")
def list_keys(*, file: File = None, context: Here) -> Shown:
    """List all keys.

    Examples:
        falaj keys list
    """
    now = datetime.now(UTC)
    found = read_keys(file or context.home / KEYS_FILE)
    facts = [_facts(key, now) for key in found]
    lines = [
        f"{key.id}  {key.state(now):<8}"
        f"{f'until {key.expires:%Y-%m-%d}' if key.expires else 'for ever':<18}"
        f"{key.subject:<20}{key.tenant or '-':<12}{' '.join(key.grants)}"
        for key in found
    ]
    return Shown(facts, lines or ["There is no key; `falaj keys create` makes one."])


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
    now, path = datetime.now(UTC), file or context.home / KEYS_FILE
    if dry_run:
        key = next((key for key in read_keys(path) if key.id == id), None)
        if key is None:
            raise ConfigurationError(f"{path} holds no key {id}. Nothing was changed")
        would = f"key {key.id} of {key.subject} would be refused. Nothing was changed"
        return Shown(_facts(key, now), [would])
    key = revoke_key(path, id)
    context.subject.update(key=key.id, subject=key.subject)
    return Shown(_facts(key, now), [f"key {key.id} of {key.subject} is refused from now on"])


accounts = App(name="accounts")


@accounts.command
def add(
    name: str,
    /,
    *,
    role: list[Literal["viewer", "operator", "approver", "admin", "auditor"]],
    tenant: str = "",
    use_case: tuple[str, ...] = (),
    context: Here,
) -> Shown:
    """Let somebody sign in, or change what they may; the new password is printed once.

    Args:
        name: Of the person.
        role: What they may; may be repeated.
        tenant: Whose use cases they see (default: all).
        use_case: May be repeated (default: all of the tenant's).

    Examples:
        falaj accounts add amal --role approver --tenant red
    """
    from infra.platform.openbao import add_account, program
    from tasks.governance.journal import Journal

    acting(context.settings, "administer", None)
    bao, password = program(context.home, "accounts"), secrets.token_urlsafe(18)
    config = read_sign_in(context.home)
    own = ("", config.tenant) if config else {"", tenant} - {*read_tenants(context.home)}
    facts = {"tenant": tenant, "use_cases": ",".join(use_case)}
    subject = {"account": name, "roles": role, **facts}
    with Journal(context.home / "audit").recorded("add-account", subject=subject):
        add_account(bao, name, password, role, is_ours=tenant in own, **facts)
        switch(context.home, [name], name, off=False)
    sys.stderr.write(f"account {name}; its password is not shown again\n")
    return Shown({"name": name, "password": password}, [password])


@accounts.command
def disable(name: str, /, *, context: Here) -> Shown:
    """Refuse somebody at once; `add` lets them in again.

    Args:
        name: Of the person.

    Raises:
        ConfigurationError: nobody has this account.
        TransientError: OpenBao does not answer. Nothing was changed.

    Examples:
        falaj accounts disable amal
    """
    from infra.platform import openbao
    from tasks.governance.journal import Journal

    by = acting(context.settings, "administer", None).name
    bao = openbao.program(context.home, "accounts")
    known = [each["name"] for each in openbao.accounts(bao)]
    if name not in known:
        raise ConfigurationError(
            f"{name!r} is no account; there are {', '.join(known) or 'none'}. Nothing was changed"
        )
    with Journal(context.home / "audit").recorded("disable-account", subject={"account": name}):
        openbao.disable_account(bao, name)
        switch(context.home, [name], by, off=True)  # its tokens are good for some minutes yet
    return Shown({"name": name}, [f"{name} is refused from now on"])


@accounts.command(name="list")
def list_accounts(*, context: Here) -> Shown:
    """List people who can sign in, or could.

    Examples:
        falaj accounts list
    """
    from infra.platform import openbao

    found = openbao.accounts(openbao.program(context.home, "accounts"))
    lines = [
        f"{each['name']:<16} {'disabled' if each['disabled'] else ' '.join(each['roles']):<24} "
        f"{each['tenant'] or 'all tenants'} {each['use_cases']}".rstrip()
        for each in found
    ]
    return Shown(found, lines or ["nobody; falaj accounts add"])


def certificates(*, host: list[str], context: Here) -> Shown:
    """Issue a certificate of a private authority: of OpenBao's for 30 days, where that runs.

    Args:
        host: Name or address of clients; may be repeated.

    Examples:
        falaj certificates --host localhost
    """
    from infra.platform.openbao import issue_certificate, program
    from serving.security.certificates import ensure_authority, ensure_certificate, expires_at

    folder = context.home / CERTIFICATES
    if own_openbao(context.home):
        pair, authority = issue_certificate(program(context.home, "platform"), folder, host)
    else:
        authority = ensure_authority(folder, "authority")
        pair = ensure_certificate(folder, "server", authority, host, "server")
    context.subject.update(hosts=host, certificate=pair.certificate.name)
    until = expires_at(pair.certificate)
    lines = [
        f"certificate  {pair.certificate} (until {until:%Y-%m-%d})",
        f"key          {pair.key}",
        f"authority    {authority.certificate}; clients trust this one",
    ]
    files = {"certificate": pair.certificate, "key": pair.key}
    return Shown({**files, "until": until, "authority": authority.certificate}, lines)
