"""Commands of tenants: add one, or change what it may hold; list them."""

from __future__ import annotations

from cyclopts import App
from cyclopts.types import NonNegativeInt, PositiveInt

from falaj.context import Here, Shown, acting
from tasks.governance.duties import who
from tasks.governance.journal import Journal
from tasks.kernel.tenants import TENANT, Tenant, put_tenant, read_tenants, tenant_home

app = App(name="tenants")


@app.command
def add(
    name: str,
    /,
    *,
    contact: str = "",
    cores: PositiveInt | None = None,
    gpus: NonNegativeInt | None = None,
    context: Here,
) -> Shown:
    """Add a tenant with a state of its own; or say anew who answers for it and what it may hold.

    Args:
        name: Small letters, digits and dashes.
        contact: Who answers for its data and models.
        cores: That its leases hold at a time (default: all).
        gpus: GPUs and slices, likewise (default: all).

    Examples:
        falaj tenants add red --contact red@example.org --cores 4
        FALAJ_TENANT=red falaj run
    """
    person = acting(context.settings, "administer", None)
    tenant = Tenant(contact=contact, cores=cores, gpus=gpus)
    subject = {"tenant": name, **tenant.model_dump()}
    with Journal(context.home / "audit").recorded("tenant", subject=subject, who=who(person)):
        folder = put_tenant(context.home, name, tenant)
    facts = {"name": name, "home": folder, **tenant.model_dump()}
    return Shown(facts, [f"{name} works in {folder}: {TENANT}={name} falaj COMMAND"])


@app.command(name="list")
def list_tenants(*, context: Here) -> Shown:
    """List tenants, with what they may hold of this machine and what they hold now.

    Examples:
        falaj tenants list
    """
    from tasks.control.leases.placement import Taken
    from tasks.control.leases.repository import LeaseRepository

    taken = Taken.by(LeaseRepository(context.settings.leases_path).claims())
    found = [
        {
            "name": name,
            "home": tenant_home(context.home, name),
            **each.model_dump(),
            "holds": {"cores": taken.cores_of_tenant[name], "gpus": taken.gpus_of_tenant[name]},
        }
        for name, each in read_tenants(context.home).items()
    ]
    lines = [
        f"{each['name']:<16} {each['holds']['cores']} of {each['cores'] or 'all'} cores, "
        f"{each['holds']['gpus']} of {'all' if each['gpus'] is None else each['gpus']} GPUs  "
        f"{each['contact']}".rstrip()
        for each in found
    ]
    return Shown(found, lines or ["no tenants; falaj tenants add NAME"])
