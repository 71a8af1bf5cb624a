"""Absurd numbers are refused against the baseline's, and honest growth is not."""

from pathlib import Path

import pandas as pd
import pytest

from flows.config import suites_of
from flows.feature_refresh import bounded_suites
from tasks.contracts.data import FeatureTables
from tasks.kernel.errors import DataContractError
from tasks.validation.runner import validate_tables
from tests.support.data.shop import Shop, orders


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    made = Shop(tmp_path)
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(made.repo))
    return made


def multiplied(factor: float, since: str, column: str = "amount") -> pd.DataFrame:
    """Orders, one of every seven since a day with a larger number."""
    rows = orders()
    chosen = (rows["ordered"] >= since) & (rows["order_id"] % 7 == 0)
    return rows.assign(**{column: rows[column].where(~chosen, rows[column] * factor)})


def validated(shop: Shop, rows: pd.DataFrame) -> FeatureTables:
    shop.write("orders", rows)
    tables, config = shop.tables(), shop.config
    suites = bounded_suites(suites_of(config, shop.repo).tables, config)
    validate_tables(tables.tables, suites, config.window, shop.store, "Nothing")
    return tables


def test_a_number_a_million_times_the_usual_is_refused_with_its_column(shop: Shop) -> None:
    with pytest.raises(DataContractError) as refused:
        validated(shop, multiplied(1e6, "2024-06"))
    told = str(refused.value)
    assert "price_of_an_item" in told
    assert "unbounded" in told
    assert "orders_28d" not in told


@pytest.mark.parametrize(("factor", "since"), [(50, "2024-06"), (1e6, "2024-01")])
def test_growth_within_reason_and_what_the_baseline_has_are_no_fault(
    shop: Shop, factor: float, since: str
) -> None:
    assert validated(shop, multiplied(factor, since)).tables


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("suite: feature_habits", "suite: feature_habits, unbounded: [price_of_an_item]"),
        ("  baseline: {start: 2024-01-01", "  baseline: {start: 2024-03-25"),
    ],
    ids=["declared", "a sparse baseline vouches for nothing"],
)
def test_any_magnitude_passes_where_it_is_declared_or_nothing_is_known(
    shop: Shop, old: str, new: str
) -> None:
    shop.replace("use_case.yaml", old, new)
    assert validated(shop, multiplied(1e6, "2024-06")).tables
