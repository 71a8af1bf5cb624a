"""Commands of grants: let another tenant read a feature view, revoke that, list them."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Annotated

from cyclopts import App, Parameter

from falaj.context import EXIT_WRONG_INPUT, Here, Shown, acting, recorded_act
from tasks.governance.grants import Grant, SharedView, change_grant, read_grants
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
        falaj grants add carrier_stats --to blue --until 2027-06-30
    """
    from flows.config import read_pipeline_config

    settings, home = context.settings, context.home
    person = acting(settings, "administer", None)
    config = read_pipeline_config(settings.feature_repo)
    known, now = [t.name for t in config.features.feature_tables], datetime.now(UTC)
    home_of(installation_of(home), to)
    if view not in known or to == name_of(home) or (until and until < now.date()):
        raise ConfigurationError(
            f"{view!r} to {to} until {until or 'revoked'} opens nothing; expected a feature view "
            f"({', '.join(known)}), another tenant, and a day that is ahead. {NOTHING}"
        )
    subject = {"use_case": config.name, "view": view, "to": to, "purpose": purpose}
    more = {"until": until, "since": now, "by": person.name}
    grant = checked(Grant, {**subject, **more}, "the grant", NOTHING)
    with recorded_act(settings, "grant", person, f"until {until or 'revoked'}", **subject):
        change_grant(home, config.name, view, to, grant)
    address = SharedView(name_of(home), config.name, view)
    return Shown(grant, [f"{to} may read it as uri: {address}"])


@app.command
def revoke(view: str, /, *, to: To, context: Here) -> Shown:
    """Take a grant back; what was read before stays with the reader.

    Args:
        view: Feature view of this use case.

    Raises:
        ConfigurationError: there is no such grant.

    Examples:
        falaj grants revoke carrier_stats --to blue
    """
    person = acting(context.settings, "administer", None)
    subject = {"use_case": context.settings.use_case, "view": view, "to": to}
    with recorded_act(context.settings, "revoke-grant", person, "", **subject):
        if not change_grant(context.home, subject["use_case"], view, to):
            seen = f"{view!r} of {subject['use_case']} is not granted to {to!r}"
            raise ConfigurationError(f"{seen}; `falaj grants list` shows what is. {NOTHING}")
    return Shown(subject, [f"{to} reads {view} no more"])


@app.command(name="list")
def list_grants(*, context: Here) -> Shown:
    """List what other tenants may read of this state, of all use cases.

    Examples:
        falaj grants list
    """
    found = read_grants(context.home)
    lines = [
        f"{f'{each.use_case}/{each.view}':<32} {each.to:<16} since {each.since:%F}, until "
        f"{each.until or 'revoked'}, by {each.by} {each.purpose}".rstrip()
        for each in found
    ]
    return Shown(found, lines or ["nothing is granted; falaj grants add VIEW --to TENANT"])


@app.command(show=False)
def read(request: str, /, *, context: Here) -> Shown:
    """Give another tenant's process what is granted to it; sources of `tenant://` ask for that.

    Args:
        request: A `Reading`, as JSON.

    Examples:
        falaj grants read REQUEST --json
    """
    from tasks.features.tables.tenants import Reading, copy_granted

    try:
        asked = checked(Reading, json.loads(request), "the request", "Nothing was read")
        return Shown(copy_granted(context.settings, asked))
    except FalajError as exc:  # told to a program, which raises it again
        return Shown({"refusal": str(exc), "code": exc.code}, code=EXIT_WRONG_INPUT)
