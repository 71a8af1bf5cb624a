"""Who may use the feature store through its servers: OIDC tokens, permissions, deny by default.

Feast's own checks let every authenticated caller do everything in a project that has no permissions
(one that does not exist is such a project) and apply one project's permissions to objects of
another. Here each server answers for one project, and what no permission names is denied. Denials
and changes of definitions are audited.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from feast import FeatureStore
from feast.errors import FeastPermissionError
from feast.permissions.action import AuthzedAction
from feast.permissions.auth.auth_manager import get_auth_manager
from feast.permissions.auth.token_parser import TokenParser
from feast.permissions.permission import Permission
from feast.permissions.policy import RoleBasedPolicy
from feast.permissions.security_manager import SecurityManager, set_security_manager
from feast.permissions.server.utils import AuthManagerType, ServerType, init_auth_manager
from feast.permissions.user import User
from starlette.authentication import AuthenticationError

from tasks.features.access.audit import AuditTrail
from tasks.features.access.provider import audit_facts, audit_trail
from tasks.kernel.errors import ConfigurationError

NOBODY = Permission(name="nobody", policy=RoleBasedPolicy(roles=[]))
"""Stands where a project has no permissions: it covers everything and lets nobody in."""

CHANGES = {AuthzedAction.CREATE, AuthzedAction.UPDATE, AuthzedAction.DELETE}
REFUSED_TOKENS_PAUSE_S = 1.0


def guard_server(store: FeatureStore, kind: ServerType) -> None:
    """Let Feast's server of this process ask for tokens, and deny what is not permitted.

    Raises:
        ConfigurationError: the registry holds no permissions, so everything would be denied.
    """
    if not store.list_permissions():
        raise ConfigurationError(
            f"project {store.project} has no permissions in its registry, so every request would "
            "be denied; define them in the feature repository (permissions.py) and run "
            "feature_refresh. Nothing was started"
        )
    trail = audit_trail(store.config)
    set_security_manager(DenyingSecurityManager(store, trail))
    init_auth_manager(kind, AuthManagerType.OIDC, store.config.auth_config)
    manager = get_auth_manager()
    manager._token_parser = AuditedTokenParser(manager.token_parser, trail, store)


class DenyingSecurityManager(SecurityManager):
    """Permissions of one project; see the module's docstring."""

    def __init__(self, store: FeatureStore, trail: AuditTrail) -> None:
        super().__init__(project=store.project, registry=store.registry)
        self._store = store
        self._trail = trail

    def set_current_project(self, project: Any) -> Any:
        """Note the project that a request names; a request about a project carries all of it."""
        return super().set_current_project(getattr(getattr(project, "spec", None), "name", project))

    @property
    def permissions(self) -> list[Permission]:
        """Those of the served project; for any other, and where there are none, nobody's."""
        asked = self._current_project.get() or self._project
        if asked != self._project:
            return [NOBODY]
        return list(super().permissions) or [NOBODY]

    def assert_permissions(
        self,
        resources: list[Any],
        actions: AuthzedAction | list[AuthzedAction],
        filter_only: bool = False,
    ) -> list[Any]:
        """Return the permitted resources; with `filter_only` the others are left out in silence.

        Raises:
            FeastPermissionError: the caller may not do this to one of them.
        """
        asked = actions if isinstance(actions, list) else [actions]
        if filter_only:
            return [resource for resource in resources if self._permits(resource, asked)]
        try:
            permitted = super().assert_permissions(resources, asked)
        except FeastPermissionError:
            self._note("denied", resources, asked, outcome="denied")
            raise
        if CHANGES & set(asked):
            self._note("apply", permitted, asked, outcome="permitted")
        return list(permitted)

    def _permits(self, resource: Any, actions: list[AuthzedAction]) -> bool:
        try:
            return bool(super().assert_permissions([resource], actions))
        except FeastPermissionError:
            return False

    def _note(
        self, action: str, resources: list[Any], asked: list[AuthzedAction], outcome: str
    ) -> None:
        subject = {"objects": sorted(f"{type(r).__name__}:{r.name}" for r in resources)}
        facts = audit_facts(self._store.config, subject, actions=[a.value for a in asked])
        self._trail.append(action, outcome=outcome, **facts)


class AuditedTokenParser(TokenParser):
    """Reads tokens as Feast does; refused ones leave a line, at most one a second."""

    def __init__(self, parser: TokenParser, trail: AuditTrail, store: FeatureStore) -> None:
        self._parser = parser
        self._trail = trail
        self._project = store.project
        self._lock = threading.Lock()
        self._refused = 0
        self._told = -REFUSED_TOKENS_PAUSE_S

    async def user_details_from_access_token(self, access_token: str) -> User:
        """The caller that a token names.

        Raises:
            AuthenticationError: it is no token of this issuer for this service, or has expired.
        """
        try:
            return await self._parser.user_details_from_access_token(access_token)
        except AuthenticationError:
            self._note()
            raise

    def _note(self) -> None:
        with self._lock:
            self._refused += 1
            if time.monotonic() - self._told < REFUSED_TOKENS_PAUSE_S:
                return
            self._told = time.monotonic()
            count, self._refused = self._refused, 0
        who = {"subject": None}
        self._trail.append(
            "denied", outcome="token refused", project=self._project, who=who, tokens=count
        )
