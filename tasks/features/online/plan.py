"""What reading one feature service online takes, worked out once, before the first request.

Feast works it out for every request: views, versions, names, keys, hash fields. A `ReadPlan` holds
the answers. Views that are keyed alike share one look-up (in Redis they lie in one hash), and their
features are laid out so that numbers of one width stand side by side and can be decoded together.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from feast import FeatureService, FeatureStore, FeatureView
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_VAL
from feast.infra.key_encoding_utils import serialize_entity_key, serialize_entity_key_prefix
from feast.infra.online_stores.helpers import compute_versioned_name
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.protos.feast.types.Value_pb2 import ValueType as ProtoType
from feast.type_map import python_values_to_proto_values
from feast.utils import _get_feature_views_to_use
from feast.value_type import ValueType

from tasks.features.config import OnlineConfig, ViewPolicy
from tasks.kernel.errors import ConfigurationError, DataContractError

FLOATS = {ValueType.FLOAT: "float32", ValueType.DOUBLE: "float64"}
_WIDTHS = {ValueType.FLOAT: 0, ValueType.DOUBLE: 1}
_UINT32 = struct.Struct("<I")
_INTEGERS = {
    ValueType.INT64: (ProtoType.INT64, struct.Struct("<q")),
    ValueType.INT32: (ProtoType.INT32, struct.Struct("<i")),
}


class PlannedFeature(NamedTuple):
    """One column of the answer."""

    view: int  # position of its view in the plan
    name: str  # in the store
    output: str  # in the answer
    value_type: ValueType


class PlannedView(NamedTuple):
    """One feature view as the service asks for it."""

    name: str  # in the answer
    stored_name: str  # in the store: with its version, where versions are kept apart
    ttl: timedelta | None
    policy: ViewPolicy
    features: tuple[PlannedFeature, ...]
    definition: FeatureView


@dataclass(frozen=True)
class KeyGroup:
    """Views that are looked up by the same columns of a request, and the order of their cells."""

    join_keys: tuple[str, ...]  # in the store, sorted as Feast serializes them
    columns: tuple[str, ...]  # of the request, in the same order
    key_types: tuple[ValueType, ...]
    views: tuple[int, ...]  # positions in the plan
    cells: tuple[PlannedFeature, ...]  # grouped by width; after them one time for each view

    def encoder(self) -> Callable[[Any], bytes]:
        """Function that serializes a key (one value, or a tuple of several) as Feast does."""
        head = serialize_entity_key_prefix(list(self.join_keys))
        if len(self.key_types) == 1:
            encode = _value_encoder(self.key_types[0])
            return lambda value: head + encode(value)
        encoders = [_value_encoder(kind) for kind in self.key_types]
        return lambda values: (
            head + b"".join([encode(value) for encode, value in zip(encoders, values, strict=True)])
        )

    def entity_key(self, key: Any) -> EntityKey:
        """A key as Feast's own stores take it."""
        values = [key] if len(self.key_types) == 1 else key
        packed = [_proto(value, kind) for value, kind in zip(values, self.key_types, strict=True)]
        return EntityKey(join_keys=self.join_keys, entity_values=packed)


@dataclass(frozen=True)
class ReadPlan:
    """Everything that does not depend on a request."""

    service: str
    project: str
    views: tuple[PlannedView, ...]
    groups: tuple[KeyGroup, ...]

    @property
    def features(self) -> list[PlannedFeature]:
        """Columns of the answer, in order."""
        return [feature for view in self.views for feature in view.features]

    @property
    def request_columns(self) -> dict[str, ValueType]:
        """Columns that a request must have, and their types."""
        return {
            column: kind
            for group in self.groups
            for column, kind in zip(group.columns, group.key_types, strict=True)
            if column != DUMMY_ENTITY_ID
        }


def plan_read(store: FeatureStore, service: FeatureService, config: OnlineConfig) -> ReadPlan:
    """Work out how `service` is read online.

    Args:
        store: opened store, whose registry knows the service.
        service: what to read.
        config: policies by view.

    Raises:
        ConfigurationError: a view is computed on demand, a policy names no view of the service, or
            two columns would have one name.
    """
    # Feast's own resolution, which also knows versions and refuses views that are switched off.
    views, on_demand = _get_feature_views_to_use(
        store.registry, store.project, service, allow_cache=True, hide_dummy_entity=False
    )
    if on_demand:
        raise ConfigurationError(
            f"feature service {service.name} has view(s) computed on demand "
            f"({', '.join(v.name for v in on_demand)}); only stored values are served here. "
            "Write those features when materializing, or read through Feast"
        )
    plain = [view.projection.name_alias or view.projection.name for view in views]
    named = [  # with its version only where a service reads two versions of one view
        view.projection.name_to_use() if plain.count(name) > 1 else name
        for view, name in zip(views, plain, strict=True)
    ]
    if unknown := sorted(config.view_policies.keys() - set(named)):
        raise ConfigurationError(
            f"features.online.view_policies names {', '.join(unknown)}, which feature service "
            f"{service.name} does not read; it reads {', '.join(named)}"
        )
    versioned = store.config.registry.enable_online_feature_view_versioning
    planned = tuple(
        PlannedView(
            name=name,
            stored_name=compute_versioned_name(view, versioned),
            ttl=view.ttl or None,
            policy=config.view_policies.get(name, config.policy),
            features=tuple(
                PlannedFeature(
                    view=position,
                    name=field.name,
                    output=f"{name}__{field.name}",  # as training sets name it
                    value_type=field.dtype.to_value_type(),
                )
                for field in view.projection.features
            ),
            definition=view,
        )
        for position, (view, name) in enumerate(zip(views, named, strict=True))
    )
    outputs = [feature.output for view in planned for feature in view.features]
    if repeated := sorted({name for name in outputs if outputs.count(name) > 1}):
        raise ConfigurationError(
            f"feature service {service.name} would give two columns named {', '.join(repeated)}; "
            "rename a view"
        )
    return ReadPlan(
        service=service.name, project=store.project, views=planned, groups=_group(planned)
    )


def _group(views: tuple[PlannedView, ...]) -> tuple[KeyGroup, ...]:
    members: dict[tuple[tuple[str, str, ValueType], ...], list[int]] = {}
    for position, view in enumerate(views):
        renamed = view.definition.projection.join_key_map
        keys = sorted(
            (column.name, renamed.get(column.name, column.name), column.dtype.to_value_type())
            for column in view.definition.entity_columns
        )
        members.setdefault(tuple(keys), []).append(position)
    return tuple(
        KeyGroup(
            join_keys=tuple(join_key for join_key, _, _ in keys),
            columns=tuple(column for _, column, _ in keys),
            key_types=tuple(kind for _, _, kind in keys),
            views=tuple(positions),
            cells=tuple(
                sorted(
                    (feature for position in positions for feature in views[position].features),
                    key=lambda feature: _WIDTHS.get(feature.value_type, len(_WIDTHS)),
                )
            ),
        )
        for keys, positions in members.items()
    )


class RequestedKeys:
    """The distinct keys of one request in one group, and which row of the request has which.

    Attributes:
        distinct: each key once: a value, or a tuple where there are several key columns.
        row_to_key: for each row the position of its key; -1 where a part of the key is null.
    """

    __slots__ = ("distinct", "row_to_key")

    def __init__(
        self, group: KeyGroup, request: Mapping[str, Sequence[Any]], num_rows: int
    ) -> None:
        if group.join_keys == (DUMMY_ENTITY_ID,):
            self.distinct, self.row_to_key = [DUMMY_ENTITY_VAL], [0] * num_rows
            return
        columns = [request[column] for column in group.columns]
        keys = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        is_null = _is_null if len(columns) == 1 else _has_null
        positions: dict[Any, int] = {}
        try:
            # A text is never null, and almost every key is one.
            self.row_to_key = [
                -1
                if type(key) is not str and is_null(key)
                else positions.setdefault(key, len(positions))
                for key in keys
            ]
        except (TypeError, ValueError) as exc:  # a list, an array: nothing that has a hash
            bad = next(key for key in keys if not _has_hash(key))
            raise _wrong_key(bad, "one value") from exc
        self.distinct = list(positions)


def _has_hash(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _is_null(value: Any) -> bool:
    """True for None, NaN, NaT and pandas' NA: what a missing key looks like."""
    if value is None:
        return True
    differs = value != value  # only what is not a number differs from itself
    return differs is not False and (type(differs).__name__ == "NAType" or bool(differs))


def _has_null(values: tuple[Any, ...]) -> bool:
    return any(type(value) is not str and _is_null(value) for value in values)


def _value_encoder(kind: ValueType) -> Callable[[Any], bytes]:
    """Function that serializes one key value: its type, its length, its bytes."""
    if kind == ValueType.STRING:
        head = _UINT32.pack(ProtoType.STRING)
        return lambda value: _text(head, value)
    if kind in _INTEGERS:
        proto, packing = _INTEGERS[kind]
        head = _UINT32.pack(proto) + _UINT32.pack(packing.size)
        return lambda value: head + _whole_number(value, packing)
    empty = len(serialize_entity_key_prefix(["k"]))

    def through_feast(value: Any) -> bytes:
        key = EntityKey(join_keys=["k"], entity_values=[_proto(value, kind)])
        try:
            packed: bytes = serialize_entity_key(key)
        except ValueError as exc:
            raise _wrong_key(value, kind.name) from exc
        return packed[empty:]

    return through_feast


def _text(head: bytes, value: Any) -> bytes:
    try:
        data = (value if type(value) is str else str(value)).encode()
    except UnicodeEncodeError as exc:
        raise _wrong_key(value, "text that UTF-8 can write") from exc
    return head + _UINT32.pack(len(data)) + data


def _whole_number(value: Any, packing: struct.Struct) -> bytes:
    try:
        whole = int(value)
        if whole != value and not isinstance(value, str):
            raise ValueError(value)
        return packing.pack(whole)
    except (TypeError, ValueError, OverflowError, struct.error) as exc:
        raise _wrong_key(value, f"whole number of {packing.size} bytes") from exc


def _proto(value: Any, kind: ValueType) -> Value:
    try:
        packed: list[Value] = python_values_to_proto_values([value], kind)
    except (TypeError, ValueError, OverflowError, AssertionError) as exc:
        raise _wrong_key(value, kind.name) from exc
    return packed[0]


def _wrong_key(value: Any, expected: str) -> DataContractError:
    return DataContractError(
        f"entity key {value!r} is a {type(value).__name__}, expected {expected}. Nothing was read"
    )
