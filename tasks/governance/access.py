"""Who may do what: the table of roles, and the decision that the authorizer takes by it.

Role-based access control (NIST INCITS 359), narrowed by tenant and use case. All is closed that no
row of `access.yaml` opens.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from tasks.governance.identity import EVERY, SignIn, Subject
from tasks.kernel.files import read_yaml

Action = Literal["read", "operate", "features", "approve", "administer", "audit"]
TABLE = Path(__file__).with_name("access.yaml")


@dataclass(frozen=True)
class Asked:
    """What a request would do.

    Attributes:
        use_case: to what is this one's; None: to the whole installation's; `*`: to no tenant's.
    """

    service: str
    action: Action
    use_case: str | None = None


@dataclass(frozen=True)
class AccessTable:
    """Roles with their actions; methods and paths of requests, in their order, and what they do."""

    roles: Mapping[str, frozenset[Action]]
    rows: tuple[tuple[frozenset[str], re.Pattern[str], Asked], ...]

    def asked(self, method: str, path: str) -> Asked | None:
        """What a request would do; None where nothing is known of it, so that it is refused.

        Args:
            method: as HTTP names it.
            path: as it was sent, without the query. Nothing is decoded: a path that hides letters
                fits no row.
        """
        for methods, pattern, asked in self.rows:
            if method in methods and (found := pattern.fullmatch(path)):
                return replace(asked, use_case=found.groupdict().get("use_case") or asked.use_case)
        return None

    def refusal(self, subject: Subject, asked: Asked | None, config: SignIn) -> str:
        """Why a subject may not do it; empty where it may."""
        if asked is None:
            return "nothing is known of this path"
        if not any(asked.action in self.roles.get(role, ()) for role in subject.roles):
            return f"no role of yours has the action {asked.action}"
        if asked.use_case == EVERY:
            return ""
        if subject.tenant != config.owner(asked.use_case):
            return "it is another tenant's"
        if not {EVERY, asked.use_case} & set(subject.use_cases):
            return "your token is not for this use case"
        return ""


@cache
def access_table() -> AccessTable:
    """The table of `access.yaml`."""
    read = read_yaml(TABLE, TABLE.name)
    actions = {*get_args(Action)}
    roles = {role: frozenset(actions & set(named)) for role, named in read["roles"].items()}
    rows = tuple(
        (frozenset(methods.split("|")), re.compile(path), Asked(service, action, *use_case))
        for service, listed in read["services"].items()
        for methods, path, action, *use_case in listed
    )
    return AccessTable(roles, rows)
