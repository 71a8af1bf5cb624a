"""Whose is a registered model: one use case registers and promotes under a name, no other one."""

from __future__ import annotations

import logging

from tasks.kernel.errors import ConfigurationError
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation, exclusive
from tasks.registry.mlflow_registry import Registry

logger = logging.getLogger(__name__)

SERVICE_TAG = "feature_service"
IMPORTS = "(imports)"
"""Owner of a name under which models are imported; no use case can be called so."""


def claim_model_name(
    use_case: str,
    service: str | None,
    config: RegistryConfig,
    location: RegistryLocation,
    *,
    reserve: bool,
) -> None:
    """See that the model name is this use case's, or nobody's, and note it as its owner.

    A model of an earlier release names no owner: it is the use case's whose feature service its
    newest version was trained on.

    Args:
        use_case: who wants to register under the name; `IMPORTS` for an import.
        service: feature service that it trains on; None for an import.
        config: the model name, and whose name is taken over.
        location: the registry.
        reserve: note the owner; else nothing is written.

    Raises:
        ConfigurationError: the name belongs to another use case. Nothing was written.
        TransientError: the registry was busy.
    """
    database = location.database_path
    if not reserve and database is not None and not database.exists():
        return
    registry, name = Registry(location), config.model_name
    with exclusive(location):
        owner = registry.owner(name)
        if owner == use_case:
            return
        if config.adopts is None or owner not in (None, config.adopts):
            _check_is_free(registry, name, owner, use_case, service)
        elif reserve:
            logger.warning("%s takes %s over from %s", _told(use_case), name, config.adopts)
        if reserve:
            registry.set_owner(name, use_case)


def _check_is_free(
    registry: Registry, name: str, owner: str | None, use_case: str, service: str | None
) -> None:
    if owner is None:
        versions = registry.versions(name)
        trained_on = versions[-1].tags.get(SERVICE_TAG, service) if versions else service
        if trained_on == service:
            return
        seen = f"holds versions that were trained on feature service {trained_on}"
        cure = "set registry.adopts to the name of the use case whose model it continues"
    else:
        seen = f"belongs to {_told(owner)}"
        cure = f'set registry.adopts: "{owner}" where it continues that model'
    who = _told(use_case) + (f" (feature service {service})" if service else "")
    raise ConfigurationError(
        f"model name {name!r} {seen}, and {who} names it too: each would replace the other's "
        f"candidate and champion. Choose a registry.model_name of its own, or {cure}. Nothing was "
        "written"
    )


def _told(owner: str) -> str:
    return "imported models" if owner == IMPORTS else f"use case {owner}"
