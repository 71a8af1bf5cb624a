"""Whose is a shared online store: two installations must not write one project's values.

Feast names everything in Redis by entity and project alone. Two installations of one project on one
Redis would serve each other's values, and a project whose name ends like another's would have its
keys removed with the other's. So the registry that first applied a project owns it there.
"""

from __future__ import annotations

from feast import FeatureStore
from feast.infra.online_stores.redis import RedisOnlineStore
from feast.project import Project

from tasks.features.access.presence import OWNERS
from tasks.kernel.errors import ConfigurationError


def claim_online_store(feast: FeatureStore) -> None:
    """Note this registry as the owner of its project in Redis, or find that it is.

    Raises:
        ConfigurationError: another registry owns the project, or two projects' names end alike.
    """
    online = feast._get_provider().online_store
    if not isinstance(online, RedisOnlineStore):
        return  # a file under the state folder has no second owner
    client = online._get_client(feast.config.online_store)
    identity = _registry_identity(feast)
    client.hsetnx(OWNERS, feast.project, identity)
    owners = {k.decode(): v.decode() for k, v in client.hgetall(OWNERS).items()}
    if owners[feast.project] != identity:
        raise ConfigurationError(
            f"project {feast.project} on this Redis belongs to another registry: two installations "
            "would overwrite each other's values. Give one another project name or another Redis, "
            f"or, if the other is gone, remove field {feast.project} of hash {OWNERS}. Nothing was "
            "written"
        )
    if alike := sorted(other for other in owners if _ends_alike(other, feast.project)):
        client.hdel(OWNERS, feast.project)
        raise ConfigurationError(
            f"project {feast.project} and project {alike[0]} share this Redis, and one name ends "
            "in the other: Feast would remove the keys of both together. Rename one or use another "
            "Redis. Nothing was written"
        )


def _ends_alike(other: str, project: str) -> bool:
    return other != project and (other.endswith(project) or project.endswith(other))


def _registry_identity(feast: FeatureStore) -> str:
    """Feast's own random id of the project in its registry."""
    known = feast.registry.list_project_metadata(feast.project)
    if known:
        return str(known[0].project_uuid)
    description = feast.config.project_description or ""
    feast.registry.apply_project(Project(name=feast.project, description=description))
    return str(feast.registry.list_project_metadata(feast.project)[0].project_uuid)
