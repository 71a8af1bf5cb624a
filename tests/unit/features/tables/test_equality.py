import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from feast.value_type import ValueType

from tasks.features.checks.parity import equal_values


def test_floats_are_equal_when_their_bits_are_and_nan_is_null() -> None:
    online = np.array([1.1, np.nan, np.nan, 0.0, 1.1], np.float32)
    offline = [1.1, None, float("nan"), -0.0, 1.1000001]
    equal, null = equal_values(
        online, pa.chunked_array([pa.array(offline, pa.float32())]), ValueType.FLOAT
    )
    assert equal.tolist() == [True, True, True, False, False]
    assert null.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("kind", "online", "offline", "same"),
    [
        (ValueType.STRING, "", None, False),
        (ValueType.STRING, None, None, True),
        (ValueType.INT64, 2**60 + 1, 2**60, False),
        (ValueType.BOOL, True, True, True),
        (
            ValueType.UNIX_TIMESTAMP,
            datetime(2013, 1, 1, tzinfo=UTC),
            datetime(2013, 1, 1, 0, 0, 0, 999_999),
            True,
        ),
        (ValueType.UUID, uuid.UUID(int=1), str(uuid.UUID(int=1)), True),
        (ValueType.DECIMAL, Decimal("1.50"), "1.50", True),
        (ValueType.FLOAT_LIST, [1.0, 2.0], [1.0, 2.5], False),
        (ValueType.INT64_SET, {1, 2}, [2, 1], True),
        (ValueType.JSON, {"a": [1]}, '{"a": [1]}', True),
        (ValueType.JSON, {"a": 1}, "not json", False),
    ],
)
def test_other_values_are_compared_as_what_they_stand_for(
    kind: ValueType, online: Any, offline: Any, same: bool
) -> None:
    equal, _ = equal_values([online], pa.chunked_array([pa.array([offline])]), kind)
    assert equal.tolist() == [same]
