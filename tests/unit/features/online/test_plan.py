from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
from feast.infra.key_encoding_utils import serialize_entity_key
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.type_map import python_values_to_proto_values
from feast.value_type import ValueType
from hypothesis import given
from hypothesis import strategies as st

from tasks.features.online.plan import KeyGroup, RequestedKeys
from tasks.kernel.errors import DataContractError

KEYS: dict[str, tuple[ValueType, st.SearchStrategy[Any]]] = {
    "beta": (ValueType.STRING, st.text()),
    "alpha": (ValueType.INT64, st.integers(-(2**63), 2**63 - 1)),
    "gamma": (ValueType.INT32, st.integers(-(2**31), 2**31 - 1)),
    "bytes": (ValueType.BYTES, st.binary(min_size=1)),
    "when": (
        ValueType.UNIX_TIMESTAMP,
        st.datetimes(datetime(1980, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    ),
}


def group(*names: str) -> KeyGroup:
    ordered = sorted(names)
    return KeyGroup(
        join_keys=tuple(ordered),
        columns=tuple(ordered),
        key_types=tuple(KEYS[name][0] for name in ordered),
        views=(),
        cells=(),
    )


@given(data=st.data(), names=st.sets(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3))
def test_keys_are_serialized_as_feast_does(data: st.DataObject, names: set[str]) -> None:
    keyed = group(*names)
    values = [data.draw(KEYS[name][1]) for name in keyed.join_keys]
    reverse = list(zip(keyed.join_keys, values, strict=True))[::-1]
    theirs = serialize_entity_key(
        EntityKey(
            join_keys=[name for name, _ in reverse],
            entity_values=[
                python_values_to_proto_values([value], KEYS[name][0])[0] for name, value in reverse
            ],
        ),
        3,
    )
    key = values[0] if len(values) == 1 else tuple(values)
    assert keyed.encoder()(key) == theirs
    assert serialize_entity_key(keyed.entity_key(key), 3) == theirs


def test_numpy_and_text_forms_of_a_number_are_one_key() -> None:
    encode = group("alpha").encoder()
    assert encode(np.int64(5)) == encode(5) == encode(5.0) == encode("5") == encode(np.float64(5))
    assert group("beta").encoder()(5) == group("beta").encoder()("5")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 2**63),
        ("alpha", 1.5),
        ("alpha", "five"),
        ("alpha", [1]),
        ("beta", "\ud800"),
        ("alpha", float("inf")),
        ("gamma", 2**31),
        ("bytes", "text"),
    ],
)
def test_a_value_that_cannot_be_a_key_is_named(name: str, value: Any) -> None:
    with pytest.raises(DataContractError, match=r"entity key .* Nothing was read"):
        group(name).encoder()(value)


def test_each_distinct_key_is_asked_once_and_nulls_never() -> None:
    columns = {
        "alpha": [1, 1, None, 2, float("nan"), pd.NA, pd.NaT, 1],
        "beta": [*"aab", None, *"aaab"],
    }
    single = RequestedKeys(group("alpha"), columns, 8)
    assert single.distinct == [1, 2]
    assert single.row_to_key == [0, 0, -1, 1, -1, -1, -1, 0]
    both = RequestedKeys(group("alpha", "beta"), columns, 8)
    assert both.distinct == [(1, "a"), (1, "b")]
    assert both.row_to_key == [0, 0, -1, -1, -1, -1, -1, 1]


def test_a_key_that_cannot_be_told_apart_is_named() -> None:
    with pytest.raises(DataContractError, match=r"entity key \[1\] is a list"):
        RequestedKeys(group("alpha"), {"alpha": [5, [1]]}, 2)
    with pytest.raises(DataContractError, match=r"entity key \(5, array"):
        RequestedKeys(group("alpha", "beta"), {"alpha": [5], "beta": [np.array(["x", "y"])]}, 1)
