"""Feast's objects of a use case that holds no definitions of its own, or no permissions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from feast import Entity, FeatureService, FeatureView, Field, FileSource, ValueType
from feast.data_source import DataSource
from feast.permissions.action import AuthzedAction
from feast.permissions.permission import Permission
from feast.permissions.policy import RoleBasedPolicy
from feast.project import Project
from feast.types import Float32, Float64, Int32, Int64, PrimitiveFeastType, String

from tasks.features.declared.columns import DescribedView, described_features
from tasks.kernel.errors import ConfigurationError

Definition: TypeAlias = Entity | DataSource | FeatureView | FeatureService | Permission

VALUES = [FeatureView, FeatureService]
TYPES: dict[str, PrimitiveFeastType] = {
    "VARCHAR": String,
    "FLOAT": Float32,
    "DOUBLE": Float64,
    "BIGINT": Int64,
    "UINTEGER": Int64,
    **dict.fromkeys(("INTEGER", "SMALLINT", "TINYINT", "USMALLINT", "UTINYINT"), Int32),
}
"""DuckDB's types to Feast's that hold the same values."""


def derived_definitions(repo: Path) -> list[Definition]:
    """Entities, sources, views and the service that follow from a use case's columns.

    An entity is called as its column. A view's values are found under the table's own name.

    Raises:
        ConfigurationError: a query is missing or wrong, or gives a column that Feast cannot hold.
    """
    use_case = described_features(repo)
    keys = {key: view.columns[key] for view in use_case.views for key in view.keys}
    entities = {key: _entity(key, kind) for key, kind in keys.items()}
    views = [_view(view, [entities[key] for key in view.keys]) for view in use_case.views]
    service = FeatureService(
        name=use_case.service, features=list(views), description=use_case.question
    )
    return [*entities.values(), *(view.batch_source for view in views), *views, service]


def _entity(key: str, kind: str) -> Entity:
    value_type = ValueType[_feast_type(key, kind, "an entity").name]
    return Entity(name=key, join_keys=[key], value_type=value_type)


def _view(view: DescribedView, entities: Sequence[Entity]) -> FeatureView:
    source = FileSource(
        name=f"{view.name}_table",
        path=view.name,
        timestamp_field="event_timestamp",
        created_timestamp_column="created",
        description=view.description,
    )
    fields: list[Any] = [
        Field(name=name, dtype=_feast_type(name, kind, f"feature table {view.name}"))
        for name, kind in view.features.items()
    ]
    return FeatureView(
        name=view.name,
        entities=list(entities),
        ttl=view.ttl,
        schema=fields,
        source=source,
        description=view.description,
    )


def _feast_type(column: str, kind: str, what: str) -> PrimitiveFeastType:
    if kind not in TYPES:
        raise ConfigurationError(
            f"column {column} of {what} is {kind}, expected one of {', '.join(TYPES)}; cast it in "
            f"the query, such as {column}::DOUBLE or {column}::VARCHAR. Nothing was applied"
        )
    return TYPES[kind]


def derived_permissions(definitions: Iterable[Definition]) -> list[Permission]:
    """Who may do what through Feast's servers, by the roles of an OIDC token.

    Readers get values online, trainers history too, operators write, administrators do all.
    """
    views = [o.name for o in definitions if isinstance(o, FeatureView)]
    services = [o.name for o in definitions if isinstance(o, FeatureService)]
    readable = [*views, *(rf"{name}(\.v\d+)?" for name in services)]

    def of_values(name: str, actions: list[AuthzedAction], *roles: str) -> Permission:
        policy = RoleBasedPolicy(roles=list(roles))
        return Permission(
            name=name, types=VALUES, name_patterns=readable, actions=actions, policy=policy
        )

    everybody = ("reader", "trainer", "operator")
    return [
        Permission(
            name="definitions_are_seen",
            types=[Project, Entity, DataSource, *VALUES],
            actions=[AuthzedAction.DESCRIBE],
            policy=RoleBasedPolicy(roles=list(everybody)),
        ),
        of_values("values_are_read_online", [AuthzedAction.READ_ONLINE], *everybody),
        of_values("values_are_read_from_history", [AuthzedAction.READ_OFFLINE], "trainer"),
        of_values(
            "values_are_written",
            [AuthzedAction.WRITE_ONLINE, AuthzedAction.WRITE_OFFLINE],
            "operator",
        ),
        Permission(name="everything_is_administered", policy=RoleBasedPolicy(roles=["admin"])),
    ]
