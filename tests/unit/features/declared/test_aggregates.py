"""Declared aggregates: what they give, against an oracle that never looks ahead."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.contracts.base import TimeWindow
from tasks.features.config import FeatureConfig, FeatureTable
from tasks.features.declared.aggregates import parse_aggregate, span
from tasks.features.declared.queries import frame_query, table_query
from tasks.features.offline.duck import set_window
from tests.support.data.declared import HABITS, ORDERS, TRAINING_SET, features
from tests.support.suite.examples import examples

START = datetime(2024, 3, 1, tzinfo=UTC)
WINDOW = TimeWindow(start=START, end=START + timedelta(hours=12))
SPANS = ("1h", "3h", "1d")
ORACLES: dict[str, Any] = {
    "count": lambda events, value: len(events),
    "count(amount)": lambda events, value: events["amount"].count(),
    "sum(amount)": lambda events, value: events["amount"].sum(min_count=1),
    "mean(amount)": lambda events, value: events["amount"].mean(),
    "min(amount)": lambda events, value: events["amount"].min(),
    "max(amount)": lambda events, value: events["amount"].max(),
    "std(amount)": lambda events, value: events["amount"].std(),
    "distinct(channel)": lambda events, value: events["channel"].nunique(),
    "first(amount)": lambda events, value: _edge(events, first=True),
    "last(amount)": lambda events, value: _edge(events, first=False),
    "share(amount > 2)": lambda events, value: (events["amount"].dropna() > 2).mean(),
}


def _edge(events: pd.DataFrame, *, first: bool) -> float:
    there = events.dropna(subset="amount").sort_values(["ordered", "amount"])
    return float(there["amount"].iloc[0 if first else -1]) if len(there) else np.nan


def rows_of(query: str, events: pd.DataFrame, window: TimeWindow = WINDOW) -> pd.DataFrame:
    """What a query over the orders gives."""
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        set_window(con, window)
        kinds = ORDERS["columns"].items()
        con.execute(f"CREATE TABLE orders ({', '.join(f'{c} {k}' for c, k in kinds)})")
        con.register("events", events)
        con.execute(f"INSERT INTO orders SELECT {', '.join(ORDERS['columns'])} FROM events")
        found = con.execute(query).df()
    return found.sort_values(["customer", "event_timestamp"]).reset_index(drop=True)


def table_of(*aggregates: str, **changes: Any) -> tuple[FeatureTable, FeatureConfig]:
    config = features(feature_tables=[{**HABITS, "aggregates": aggregates, **changes}])
    return config.feature_tables[0], config


@st.composite
def orders(draw: st.DrawFn) -> pd.DataFrame:
    """Orders of two customers, on a grid of half hours so that moments and edges meet."""
    steps = draw(st.lists(st.integers(-52, 23), min_size=1, max_size=14))
    some = st.sampled_from([None, 0.5, 1.0, 2.0, 4.0])
    return pd.DataFrame(
        {
            "order_id": range(len(steps)),
            "customer": [draw(st.sampled_from(["a", "b", None])) for _ in steps],
            "ordered": [START + timedelta(minutes=30 * step) for step in steps],
            "channel": [draw(st.sampled_from(["web", "shop", None])) for _ in steps],
            "amount": pd.array([draw(some) for _ in steps], dtype="Float64").astype(float),
            "gift": False,
            "returned": [draw(st.booleans()) for _ in steps],
        }
    )


@given(events=orders())
@examples(8)
def test_each_aggregate_is_that_of_the_events_up_to_its_own_moment(events: pd.DataFrame) -> None:
    over = ", ".join(SPANS)
    declared = [f"{name if '(' in name else f'{name}()'} over {over} as f{number}"
                for number, name in enumerate(ORACLES)]  # fmt: skip
    table, config = table_of(*declared, "time_since_last() over 1d")
    found = rows_of(table_query(Path(), table, config), events)
    moments = events.dropna(subset="customer").drop_duplicates(["customer", "ordered"])
    inside = moments[(moments["ordered"] >= WINDOW.start) & (moments["ordered"] < WINDOW.end)]
    assert len(found) == len(inside)
    for _, row in found.iterrows():
        own = events[events["customer"] == row["customer"]]
        past = own[own["ordered"] <= row["event_timestamp"]]  # the oracle sees no more than this
        for number, oracle in enumerate(ORACLES.values()):
            for each in SPANS:
                expected = oracle(past[past["ordered"] > row["event_timestamp"] - span(each)], None)
                np.testing.assert_allclose(row[f"f{number}_{each}"], expected, rtol=1e-5)
        before = past[past["ordered"] < row["event_timestamp"]]["ordered"].max()
        age = (row["event_timestamp"] - before) / pd.Timedelta(hours=1)
        known = age if pd.notna(before) and age <= 24 else np.nan
        np.testing.assert_allclose(row["hours_since_last_1d"], known, rtol=1e-5)


@given(events=orders(), cut=st.integers(0, 23))
@examples(5)
def test_what_happens_later_changes_no_feature_and_no_older_event_is_needed(
    events: pd.DataFrame, cut: int
) -> None:
    table, config = table_of("count() over 3h", "mean(amount) over 1d", "last(channel)")
    query, moment = table_query(Path(), table, config), START + timedelta(minutes=30 * cut)
    window = TimeWindow(start=START, end=moment + timedelta(minutes=1))
    later, old = events["ordered"] > moment, events["ordered"] <= START - timedelta(hours=24)
    spoilt = events.assign(
        amount=events["amount"].where(~later, 1e6), channel=events["channel"].where(~later, "x")
    )
    pd.testing.assert_frame_equal(
        rows_of(query, events, window), rows_of(query, spoilt[~old], window)
    )
    assert table.lookback_hours == 24


@given(events=orders(), cut=st.integers(0, 23))
@examples(5)
def test_labels_that_are_not_known_yet_change_no_feature(events: pd.DataFrame, cut: int) -> None:
    settled = {**TRAINING_SET, "label_known_after": "2h"}
    table = {**HABITS, "aggregates": ["share(returned) over 1d", "count() over 1d"]}
    config = features(feature_tables=[table], training_set=settled)
    query = table_query(Path(), config.feature_tables[0], config)
    moment = START + timedelta(minutes=30 * cut)
    unknown = events["ordered"] > moment - timedelta(hours=2)
    spoilt = events.assign(returned=events["returned"] ^ unknown)
    window = TimeWindow(start=START, end=moment + timedelta(minutes=1))
    before, after = rows_of(query, events, window), rows_of(query, spoilt, window)
    pd.testing.assert_frame_equal(before, after)
    assert before["count_1d"].min() >= 1 or before.empty  # the event itself counts


def test_a_label_is_there_once_it_is_known_and_the_row_holds_nothing_of_it() -> None:
    config = features(feature_tables=[HABITS])
    events = pd.DataFrame(
        {
            **{"order_id": [1, 2, 3], "customer": "a", "channel": "web", "amount": 1.0},
            **{"gift": [True, False, None], "returned": [True, None, True]},
            "ordered": [START, START + timedelta(days=1), START + timedelta(days=20)],
        }
    )
    window = TimeWindow(start=START, end=START + timedelta(days=21))
    found = rows_of(frame_query(Path(), config), events, window)
    assert list(found) == ["order_id", "event_timestamp", "customer", "channel", "amount", "gift",
                           "returned", "excluded"]  # fmt: skip
    assert list(found["order_id"]) == ["1", "2", "3"]
    assert list(found["event_timestamp"] - events["ordered"]) == [timedelta(hours=1)] * 3
    assert list(found["returned"].isna()) == [False, True, True]
    assert list(found["excluded"].fillna("")) == ["", "no label", "the label is not known yet"]


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("returned AND channel = 'web'", ["customer", "amount"]),
        (
            "lead(amount) OVER (PARTITION BY customer ORDER BY ordered) > amount",  # of another row
            ["customer", "channel", "amount", "returned::VARCHAR AS returned"],
        ),
    ],
)
def test_a_label_may_be_an_expression_whose_columns_are_hidden(
    label: str, shown: list[str]
) -> None:
    training_set = {**TRAINING_SET, "label": label, "ignore": ["gift"]}
    habits = {**HABITS, "aggregates": ["mean(amount) over 7d"]}
    query = frame_query(Path(), features(feature_tables=[habits], training_set=training_set))
    assert f"{label} AS label_of_row" in query
    assert re.findall(r"^    ([a-z]+|returned::.*),$", query, re.MULTILINE) == shown


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ("mean(amount)", "does not say over which time"),
        ("mean() over 7d", "mean takes a column or an expression"),
        ("time_since_last(amount) over 7d", "time_since_last takes nothing"),
        ("median(amount) over 7d", "there is no function 'median'; there are count, sum"),
        ("mean(amount) over 7 days", "is no aggregate; expected such as"),
        ("mean(amount) over 0h", "0h is no time at all"),
        ("last(returned)", "is of the label, which is not known at its event but 14d later"),
        ("mean(returned) over 7d", "choose a time `over` which some are known"),
    ],
)
def test_a_wrong_aggregate_is_answered_with_what_is_expected(declared: str, told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        table_of(declared)


def test_features_of_one_name_are_told_with_a_cure() -> None:
    with pytest.raises(ValidationError, match=r"gives? amount_100_share_7d twice.*`as`"):
        table_of("share(amount > 100) over 7d", "share(amount < 100) over 7d")


def test_names_say_what_a_feature_is() -> None:
    texts = ("count() over 7d", "mean(amount) over 1h, 4w", "last(channel)",
             "share(amount > 100) over 7d as large", "time_since_last() over 2w")  # fmt: skip
    assert [each.name for text in texts for each in parse_aggregate(text)] == [
        *("count_7d", "amount_mean_1h", "amount_mean_4w", "channel_last", "large_7d"),
        "hours_since_last_2w",
    ]
