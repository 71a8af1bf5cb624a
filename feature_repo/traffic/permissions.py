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
    "recent_flow",
    "slot_history",
    "weather",
    r"hourly_volume_v1(\.v\d+)?",
]
VALUES = [FeatureView, FeatureService]

definitions_are_seen = Permission(
    name="definitions_are_seen",
    types=[Project, Entity, DataSource, *VALUES],
    actions=[AuthzedAction.DESCRIBE],
    policy=RoleBasedPolicy(roles=["reader", "trainer", "operator"]),
)
values_are_read_online = Permission(
    name="values_are_read_online",
    types=VALUES,
    name_patterns=READABLE,
    actions=[AuthzedAction.READ_ONLINE],
    policy=RoleBasedPolicy(roles=["reader", "trainer", "operator"]),
)
values_are_read_from_history = Permission(
    name="values_are_read_from_history",
    types=VALUES,
    name_patterns=READABLE,
    actions=[AuthzedAction.READ_OFFLINE],
    policy=RoleBasedPolicy(roles=["trainer"]),
)
values_are_written = Permission(
    name="values_are_written",
    types=VALUES,
    name_patterns=READABLE,
    actions=[AuthzedAction.WRITE_ONLINE, AuthzedAction.WRITE_OFFLINE],
    policy=RoleBasedPolicy(roles=["operator"]),
)
everything_is_administered = Permission(
    name="everything_is_administered",
    policy=RoleBasedPolicy(roles=["admin"]),
)
