"""Feature views that a tenant lets other tenants read, until it revokes that; and their addresses.

    <owner's state>/grants.json            all grants of a state, signed by a key of that state
    tenant://<owner>/<use case>/<view>     what a raw table of another tenant names as its `uri`

A grant is looked up, and its signature verified, at every read. Nothing but the view is opened by
it. The installation's own state is the tenant `installation`.
"""

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from tasks.governance.handling import Purpose
from tasks.kernel.errors import AccessError, SignatureError
from tasks.kernel.keys.choice import key_store, trusted_keys
from tasks.kernel.keys.signed import read_signed, signed
from tasks.kernel.keys.store import EVIDENCE
from tasks.kernel.settings import bring, put
from tasks.kernel.tenants import INSTALLATION, NAME, name_of
from tasks.kernel.values import Contract, checked

FILE, SCHEME = "grants.json", "tenant://"
_ADDRESS = re.compile(
    rf"{SCHEME}({NAME})/([a-z][a-z0-9-]*)/([a-z][a-z0-9_]*)(?:@([0-9a-f]{{12}}))?"
)


class SharedView(NamedTuple):
    """A feature view of another tenant, as an address names it."""

    owner: str
    use_case: str
    name: str
    version: str = ""
    """Beginning of the digest of the published feature tables; empty: whichever they are."""

    @classmethod
    def of(cls, uri: str) -> "SharedView":
        """The view that a raw table's uri names.

        Raises:
            ValueError: it names none.
        """
        if not (found := _ADDRESS.fullmatch(uri)):
            raise ValueError(
                f"{uri!r} names no feature view of a tenant; expected {SCHEME}TENANT/USE_CASE/"
                f"VIEW, of which TENANT may be {INSTALLATION}"
            )
        return cls(*(part or "" for part in found.groups()))

    def __str__(self) -> str:
        """Its address."""
        at = self.version and f"@{self.version}"
        return f"{SCHEME}{self.owner}/{self.use_case}/{self.name}{at}"


def shared_views(uris: Iterable[str]) -> list[SharedView]:
    """Those that a use case reads, by the uris of its raw tables."""
    return [SharedView.of(uri) for uri in uris if uri.startswith(SCHEME)]


class Grant(Contract):
    """One feature view that one tenant may read."""

    use_case: str
    view: str
    to: str
    purpose: Purpose | Literal[""] = ""
    """What alone the data may be processed for; empty: the grant does not say."""
    since: datetime
    until: date | None = None
    """Last day on which it holds, UTC; None: until it is revoked."""
    by: str
    """Who gave it."""


class _Grants(Contract):
    grants: tuple[Grant, ...]


def read_grants(home: Path) -> tuple[Grant, ...]:
    """The grants of a state, also those that have ended.

    Raises:
        SignatureError: no key of this state signed them, or they were changed since.
    """
    file = home / FILE
    try:
        text = bring(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    content = read_signed(trusted_keys(home, EVIDENCE), text, str(file))
    return checked(_Grants, content, str(file), "Nothing was read").grants


def change_grant(home: Path, use_case: str, view: str, to: str, grant: Grant | None = None) -> bool:
    """Put a grant in the place of the one of this view to this tenant; None: revoke that.

    Returns:
        Whether there was one.

    Raises:
        SignatureError: those that are there were changed.
        TransientError, StorageError: the key store or the disk refuses.
    """
    from tasks.metadata.database import held_everywhere  # takes its time, and few change grants

    with held_everywhere(home / "grants.lock"):
        found = {(each.use_case, each.view, each.to): each for each in read_grants(home)}
        known = found.pop((use_case, view, to), None)
        content = _Grants(grants=(*found.values(), *([grant] if grant else [])))
        put(home / FILE, signed(key_store(home), content.model_dump(mode="json")))
    return known is not None


def check_grant(home: Path, use_case: str, view: str, to: str, purpose: str) -> None:
    """See that a tenant may read a feature view of this state now, for a purpose.

    Raises:
        AccessError: there is none, it has ended, or is for another purpose.
    """
    owner, what = name_of(home), f"{to} read the feature view {view} of {use_case}"
    ask = f"ask who administers {owner} for `falaj grants add {view} --to {to}` there"
    try:
        found = {(each.use_case, each.view, each.to): each for each in read_grants(home)}
    except SignatureError as exc:
        again = f"ask who administers {owner} to move it away, and to grant anew"
        raise AccessError(f"the grants of {owner} do not count: {exc}; {again}") from exc
    if (grant := found.get((use_case, view, to))) is None:
        raise AccessError(f"{owner} does not let {what}, or does no more; {ask}")
    if grant.until and grant.until < datetime.now(UTC).date():
        raise AccessError(f"{owner} let {what} until {grant.until}; {ask}")
    if grant.purpose not in ("", purpose):
        raise AccessError(
            f"{owner} lets {what} for {grant.purpose} alone, and `purpose` of use_case.yaml is "
            f"{purpose or 'not said'}; process it for that, or {ask} with another --purpose"
        )
