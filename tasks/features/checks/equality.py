"""When an online and a retrieved value are the same: exactly, in the type the view declares.

What the feature room reports of itself: parity and verified snapshots.

Values like those of `tasks.contracts`; no other room needs them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from feast.value_type import ValueType
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from tasks.contracts.base import RESULT, Contract
from tasks.features.online.plan import FLOATS, PlannedFeature, PlannedView
from tasks.kernel.errors import FeatureStoreError

_BITS = {"float32": np.uint32, "float64": np.uint64}


def retrieved_column(
    retrieved: pa.Table, view: PlannedView, feature: PlannedFeature
) -> pa.ChunkedArray:
    """Column of a retrieval, with full names, that holds a feature.

    Raises:
        FeatureStoreError: retrieval gave no such column.
    """
    projection = view.definition.projection
    pinned = f"{projection.name_to_use()}__{feature.name}"
    plain = f"{projection.name_alias or projection.name}__{feature.name}"
    for name in (pinned, plain):
        if name in retrieved.column_names:
            return retrieved.column(name)
    raise FeatureStoreError(
        f"retrieval gave no column {pinned}; it has {', '.join(retrieved.column_names)}. Nothing "
        "was compared"
    )


def equal_values(
    online: NDArray[Any] | Sequence[Any], offline: pa.ChunkedArray, kind: ValueType
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each row whether both values are the same, and whether both are null.

    Floats are the same when their bits are; NaN counts as null. Nothing else is rounded, but
    moments are compared in whole seconds, which is what Feast keeps online.
    """
    if kind in FLOATS:
        return _equal_floats(np.asarray(online), offline, FLOATS[kind])
    pairs = [
        (_comparable(ours), _comparable(theirs))
        for ours, theirs in zip(online, offline.to_pylist(), strict=True)
    ]
    same = np.array([_is_same(ours, theirs) for ours, theirs in pairs], bool)
    null = np.array([ours is None and theirs is None for ours, theirs in pairs], bool)
    return same, null


def numbers_of(offline: pa.ChunkedArray, name: str) -> NDArray[np.floating[Any]]:
    """A retrieved column as floats of the named type, NaN for null."""
    kind = pa.float32() if name == "float32" else pa.float64()
    numbers = offline.cast(kind, safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(numbers, dtype=name)


def as_text(value: Any) -> str | None:
    """A value for people; None for null."""
    plain = _comparable(value)
    if plain is None:
        return None
    return repr(plain) if isinstance(plain, float) else str(plain)


def _equal_floats(
    online: NDArray[np.floating[Any]], offline: pa.ChunkedArray, name: str
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    theirs = numbers_of(offline, name)
    ours = np.ascontiguousarray(online, dtype=name)
    null = np.isnan(ours) & np.isnan(theirs)
    return (ours.view(_BITS[name]) == theirs.view(_BITS[name])) | null, null


def _comparable(value: Any) -> Any:
    """One form for what both sides write differently."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, np.generic):
        return _comparable(value.item())
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return aware.astimezone(UTC).replace(microsecond=0)
    if isinstance(value, uuid.UUID | Decimal):
        return str(value)
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, set) and isinstance(theirs, list):
        return bool(ours == set(theirs))
    if isinstance(ours, dict) and isinstance(theirs, list):  # how Arrow gives a map
        return bool(ours == {pair[0]: pair[1] for pair in theirs})
    if isinstance(ours, dict | list) and isinstance(theirs, str):  # JSON is text offline
        try:
            return bool(ours == json.loads(theirs))
        except json.JSONDecodeError:
            return False
    return bool(ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool))


class ParityDifference(Contract):
    """One value that is not the same online and offline."""

    view: str
    feature: str
    entity: dict[str, str] = Field(description="Key column to value.")
    online: str | None
    offline: str | None
    online_event_time: datetime | None = Field(description="Of the row that is stored online.")
    offline_event_time: datetime | None = Field(
        description="Of the newest row before the watermark in the feature table."
    )
    moment: datetime = Field(description="Moment at which both were asked.")


class ViewParity(Contract):
    """Online against offline values of one view."""

    view: str
    watermark: datetime = Field(description="The store holds what happened before this moment.")
    num_entities: NonNegativeInt = Field(description="Entities that were compared.")
    num_values: NonNegativeInt
    num_differing: NonNegativeInt = Field(description="Values that are not exactly equal.")
    num_null: NonNegativeInt = Field(description="Values that are null on both sides.")
    num_stale: NonNegativeInt = Field(description="Entities blanked on both sides by the TTL.")
    num_overtaken: NonNegativeInt = Field(
        description="Entities drawn but not compared: a row that arrived late was known only after "
        "a newer one, so no moment shows it offline."
    )


class ParityReport(Contract):
    """Whether the online store gives what historical retrieval gives at the same moments."""

    feature_service: str
    tables_version: str
    seed: NonNegativeInt
    views: tuple[ViewParity, ...]
    examples: tuple[ParityDifference, ...]
    result: str = Field(pattern="^(equal|different|nothing compared)$", validation_alias=RESULT)
    evidence: tuple[str, ...] = Field(description="The result in sentences, one a view at fault.")


class SnapshotVerification(Contract):
    """Outcome of making a snapshot again from what it pins."""

    snapshot_sha256: str
    rebuilt_sha256: str | None = Field(description="None where it could not be made again.")
    differences: tuple[str, ...] = Field(description="What differs, or why it could not be made.")
    remarks: tuple[str, ...] = Field(description="What has changed since, and does not matter.")

    @property
    def same(self) -> bool:
        """True where the same bytes came out."""
        return self.rebuilt_sha256 == self.snapshot_sha256
