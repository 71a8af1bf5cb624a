"""Commands of tenants: add one, or change what it may hold; list them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from falaj.context import Here, Shown, acting, row
from tasks.governance.duties import who
from tasks.governance.journal import Journal
from tasks.kernel.tenants import (
    FOLDER,
    TENANT,
    Tenant,
    check_installation,
    put_tenant,
    read_tenants,
)
from tasks.kernel.values import checked

app = App(name="tenants")
Most = Annotated[
    str | None, Parameter(help="That its leases hold at a time, or `all` (default: as it is).")
]
NOTHING = "Nothing was changed"


@app.command
def add(
    name: str,
    /,
    *,
    contact: str | None = None,
    cores: Most = None,
    gpus: Most = None,
    context: Here,
) -> Shown:
    """Add a tenant with a state of its own; or say anew who answers for it and what it may hold.

    Args:
        name: Small letters, digits and dashes.
        contact: Who answers for its data and models.

    Examples:
        falaj tenants add red --contact red@example.org --cores 4
        FALAJ_TENANT=red falaj run
    """
    person = acting(context.settings, "administer", None)
    said = {"contact": contact, "cores": cores, "gpus": gpus}
    said = {n: None if v == "all" else v for n, v in said.items() if v is not None}
    known = read_tenants(context.home).get(name, Tenant()).model_dump()
    tenant = checked(Tenant, {**known, **said}, f"the tenant {name}", NOTHING)
    subject = {"tenant": name, **tenant.model_dump()}
    with Journal(context.home / "audit").recorded("tenant", subject=subject, who=who(person)):
        folder = put_tenant(context.home, name, tenant)
    return Shown({**subject, "home": folder}, [_line(name, tenant), row("Use", f"{TENANT}={name}")])


@app.command(name="list")
def list_tenants(*, context: Here) -> Shown:
    """List tenants, with what they may hold of this machine and what they hold now.

    Examples:
        falaj tenants list
    """
    from tasks.control.leases.placement import Taken
    from tasks.control.leases.repository import LeaseRepository

    check_installation(context.home)
    taken, found, lines = Taken.by(LeaseRepository(context.settings.leases_path).claims()), [], []
    for name, each in read_tenants(context.home).items():
        holds = {"cores": taken.cores_of_tenant[name], "gpus": taken.gpus_of_tenant[name]}
        home = context.home / FOLDER / name
        found.append({"tenant": name, **each.model_dump(), "home": home, "holds": holds})
        lines.append(f"{_line(name, each)}; holds {holds['cores']} and {holds['gpus']}")
    return Shown(found, lines or ["no tenants; falaj tenants add NAME"])


def _line(name: str, tenant: Tenant) -> str:
    gpus = "all" if tenant.gpus is None else tenant.gpus
    held = f"at most {tenant.cores or 'all'} cores and {gpus} GPUs"
    return f"{name:<16} {tenant.contact or 'nobody named'}; {held}"
