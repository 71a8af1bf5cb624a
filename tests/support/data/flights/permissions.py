"""Who may do what through Feast's servers, by the roles of an OIDC token.

What no permission names is denied. A view or service is readable only where `READABLE` names it.
"""

from feast import Entity, FeatureService, FeatureView
from feast.data_source import DataSource
from feast.permissions.action import AuthzedAction
from feast.permissions.permission import Permission
from feast.permissions.policy import RoleBasedPolicy
from feast.project import Project

READABLE = [
    "carrier_stats",
    "origin_stats",
    "destination_stats",
    "route_stats",
    "plane_history",
    "planes",
    "weather",
    r"flight_delay_v1(\.v\d+)?",
]
VALUES = [FeatureView, FeatureService]


def of_values(name: str, actions: list[AuthzedAction], *roles: str) -> Permission:
    """What these roles may do with the values of readable views and services."""
    policy = RoleBasedPolicy(roles=list(roles))
    return Permission(
        name=name, types=VALUES, name_patterns=READABLE, actions=actions, policy=policy
    )


definitions_are_seen = Permission(
    name="definitions_are_seen",
    types=[Project, Entity, DataSource, *VALUES],
    actions=[AuthzedAction.DESCRIBE],
    policy=RoleBasedPolicy(roles=["reader", "trainer", "operator"]),
)
values_are_read_online = of_values(
    "values_are_read_online", [AuthzedAction.READ_ONLINE], "reader", "trainer", "operator"
)
values_are_read_from_history = of_values(
    "values_are_read_from_history", [AuthzedAction.READ_OFFLINE], "trainer"
)
values_are_written = of_values(
    "values_are_written", [AuthzedAction.WRITE_ONLINE, AuthzedAction.WRITE_OFFLINE], "operator"
)
everything_is_administered = Permission(
    name="everything_is_administered", policy=RoleBasedPolicy(roles=["admin"])
)
