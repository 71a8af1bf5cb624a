"""Commands of the gateway: Envoy before the server, and shares of traffic."""

import json
import sys
from typing import Annotated

from cyclopts import App, Parameter

from falaj.context import EXIT_FAILED, AsJson, Here
from infra.gateway.config import GatewayConfig, Shares, read_plan, read_shares

app = App(name="gateway")
Model = Annotated[str | None, Parameter(help="Model of edge.yaml (default: all).")]
Share = Annotated[float | None, Parameter(help="Share of the requests, 0 to 1.")]


@app.command
def prepare(*, context: Here) -> None:
    """Write what Envoy reads, and certificates; a running Envoy takes what has changed."""
    from infra.gateway.prepare import PUBLIC
    from infra.gateway.prepare import prepare as write
    from infra.gateway.rendering import public_pair
    from serving.security.certificates import expires_at

    plan = read_plan(context.home)
    write(plan)
    pair, place = public_pair(plan), plan.files
    print(f"prepared in {place.folder}")
    print(f"clients see    {pair.certificate} until {expires_at(pair.certificate):%Y-%m-%d}")
    if plan.config.certificate is None:
        print(f"clients trust  {place.certificates / f'{PUBLIC}.pem'}")
    print(f"server's part  {place.server_security_file}")
    if not place.security_file.exists():
        print(f"nobody has access yet: {place.security_file} has to name issuers or api_keys")


@app.command
def run(*, context: Here) -> int:
    """Prepare, then run Envoy in the foreground; SIGTERM ends it in order."""
    from infra.gateway.envoy import run_envoy
    from infra.gateway.prepare import prepare as write

    plan = read_plan(context.home)
    write(plan)
    return run_envoy(plan)


@app.command
def check(*, context: Here) -> int:
    """Check the configuration, and change nothing that runs."""
    from infra.gateway.envoy import check_bootstrap
    from infra.gateway.prepare import prepare as write

    plan = read_plan(context.home)
    write(plan)
    if fault := check_bootstrap(plan):
        sys.stderr.write(f"Envoy refuses the configuration: {fault}\n")
        return EXIT_FAILED
    print("Envoy takes its first file; `status` shows whether a running one took the others")
    return 0


@app.command
def status(*, as_json: AsJson = False, context: Here) -> int:
    """Show what runs, the shares, and what Envoy refused; exit code 1 where not all is well."""
    from infra.gateway.envoy import Admin

    plan = read_plan(context.home)
    admin = Admin(plan.files.folder)
    ready = admin.is_ready()
    refused = admin.refusals() if ready else []
    kept = read_shares(plan.files.shares_file)
    found = {name: kept.get(name, Shares()) for name in plan.config.models}
    if as_json:
        shares = {name: share.model_dump() for name, share in found.items()}
        print(json.dumps({"ready": ready, "refused": refused, "shares": shares}))
    else:
        print(f"gateway        {'up' if ready else 'down'}, {plan.config.listen}")
        for fault in refused:
            print(f"refused        {fault}")
        for name, share in found.items():
            print(_line(name, share))
    return 0 if ready and not refused else EXIT_FAILED


@app.command
def shares(
    model: Model = None,
    /,
    *,
    candidate: Share = None,
    mirror: Share = None,
    random: bool = False,
    context: Here,
) -> None:
    """Show the shares of traffic, or set them: shares flight-delay --candidate 0.1 --mirror 0.5.

    Args:
        model: Model of edge.yaml (default: all).
        candidate: Share that the candidate answers, 0 to 1.
        mirror: Share copied to the shadow version too, 0 to 1.
        random: Draw each request independently.
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
    for name in [model] if model else sorted(plan.config.models):
        print(_line(name, traffic.shares(name)))


@app.command
def settings() -> None:
    """Show all settings of edge/edge.yaml with their defaults and what they mean: a JSON schema."""
    print(json.dumps(GatewayConfig.model_json_schema(), indent=1))


def _line(name: str, shares: Shares) -> str:
    how = "sticky" if shares.sticky else "drawn for each request"
    return f"{name:<20} candidate {shares.candidate:.2%}, mirror {shares.mirror:.2%}, {how}"
