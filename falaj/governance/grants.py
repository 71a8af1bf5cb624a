"""Commands of grants: let another tenant read a feature view, revoke that, list them."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Annotated, Any

from cyclopts import App, Parameter

from falaj.context import EXIT_WRONG_INPUT, Here, Shown, acting
from tasks.governance.duties import who
from tasks.governance.grants import Grant, SharedView, put_grant, read_grants, remove_grant
from tasks.governance.journal import Journal
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.tenants import home_of, installation_of, name_of
from tasks.kernel.values import checked

NOTHING = "Nothing was changed"
app = App(name="grants")
To = Annotated[str, Parameter(help="Tenant that may read it, or `installation`.")]


@app.command
def add(
    view: str, /, *, to: To, purpose: str = "", until: date | None = None, context: Here
) -> Shown:
    """Let another tenant read a feature view of this use case, until this is revoked.

    Args:
        view: Feature view, as `feature_tables` of use_case.yaml names it.
        purpose: What alone it may be processed for, such as fraud-detection.
        until: Last day on which it may be read (UTC).

    Examples:
        FALAJ_TENANT=red falaj grants add carrier_delay --to blue --until 2027-06-30
    """
    from flows.config import read_pipeline_config

    person = acting(context.settings, "administer", None)
    home = context.home
    config = read_pipeline_config(context.settings.feature_repo)
    known = [table.name for table in config.features.feature_tables]
    if view not in known:
        raise ConfigurationError(
            f"{config.name} has no feature view {view!r}; expected {', '.join(known)}. {NOTHING}"
        )
    home_of(installation_of(home), to)
    now, owner = datetime.now(UTC), name_of(home)
    if to == owner or (until and until < now.date()):
        raise ConfigurationError(
            f"a grant of {owner} to {to} until {until or 'it is revoked'} opens nothing; name "
            f"another tenant, and a day that is ahead. {NOTHING}"
        )
    subject = {"use_case": config.name, "view": view, "to": to, "purpose": purpose, "until": until}
    grant = checked(Grant, {**subject, "since": now, "by": person.name}, "the grant", NOTHING)
    with Journal(home / "audit").recorded("grant", subject=subject, who=who(person)):
        put_grant(home, grant)
    return Shown(grant, [f"{to} may read it as uri: {SharedView(owner, config.name, view)}"])


@app.command
def revoke(view: str, /, *, to: To, context: Here) -> Shown:
    """Take a grant back; what was read before stays with the reader.

    Args:
        view: Feature view of this use case.

    Raises:
        ConfigurationError: there is no such grant.

    Examples:
        FALAJ_TENANT=red falaj grants revoke carrier_delay --to blue
    """
    person = acting(context.settings, "administer", None)
    subject = {"use_case": context.settings.use_case, "view": view, "to": to}
    with Journal(context.home / "audit").recorded("revoke-grant", subject=subject, who=who(person)):
        if not remove_grant(context.home, **subject):
            raise ConfigurationError(
                f"{view!r} of {subject['use_case']} is not granted to {to!r}; `falaj grants list` "
                f"shows what is. {NOTHING}"
            )
    return Shown(subject, [f"{to} reads {view} no more"])


@app.command(name="list")
def list_grants(*, context: Here) -> Shown:
    """List what other tenants may read of this state, of all use cases.

    Examples:
        falaj grants list
    """
    found, today = read_grants(context.home), datetime.now(UTC).date()
    lines = [
        f"{f'{each.use_case}/{each.view}':<32} {each.to:<16} "
        f"since {each.since:%F}, {_end(each, today)} by {each.by} {each.purpose}".rstrip()
        for each in found
    ]
    return Shown(found, lines or ["nothing is granted; falaj grants add VIEW --to TENANT"])


def _end(grant: Grant, today: date) -> str:
    if grant.until is None:
        return "until revoked,"
    return f"{'ended' if grant.until < today else 'until'} {grant.until},"


@app.command(show=False)
def read(request: str, /, *, context: Here) -> Shown:
    """Give another tenant's process what is granted to it; sources of `tenant://` ask for that.

    Args:
        request: A `Reading`, as JSON.
    """
    from tasks.features.tables.tenants import Reading, copy_granted

    try:
        asked = checked(Reading, json.loads(request), "the request", "Nothing was read")
        return Shown(copy_granted(context.settings, asked))
    except FalajError as exc:  # told to a program, which raises it again
        facts: dict[str, Any] = {"refusal": str(exc), "code": exc.code}
        return Shown(facts, [str(exc)], EXIT_WRONG_INPUT)
