"""Many files as one table, and what of them a window needs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows, SourceFile
from tasks.features.tables import landing
from tasks.features.tables.landing import land_raw_rows
from tasks.features.tables.sources import Source
from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tests.support.data.shop import Shop, orders

MONTHS = [f"2024-{month:02d}" for month in range(1, 7)]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path)
    (shop.repo / "raw" / "orders").mkdir()
    return shop


def typed() -> pd.DataFrame:
    return orders().assign(ordered=lambda rows: pd.to_datetime(rows["ordered"]))


def monthly(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {month: rows[rows["ordered"].astype(str).str.startswith(month)] for month in MONTHS}


def month(number: int) -> TimeWindow:
    edges = pd.date_range("2024-01-01", periods=7, freq="MS", tz="UTC")
    return TimeWindow(start=edges[number].to_pydatetime(), end=edges[number + 1].to_pydatetime())


def source(shop: Shop, uri: str) -> None:
    shop.replace("use_case.yaml", "uri: raw/orders.csv", f"uri: {uri}")


def land(shop: Shop, window: TimeWindow | None = None) -> LandedRows:
    config = shop.config
    return land_raw_rows(window or config.window, config.features, shop.repo, shop.store)


def rows(shop: Shop, landed: LandedRows) -> pd.DataFrame:
    return pd.read_parquet(shop.store.path(landed.tables[0].artifact))


def seen(landed: LandedRows) -> SourceFile:
    assert landed.tables[0].source
    return landed.tables[0].source


FORMS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "csv": lambda frame, file: frame.to_csv(file, index=False),
    "csv.gz": lambda frame, file: frame.to_csv(file, index=False),
    "parquet": lambda frame, file: frame.to_parquet(file),
    "jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True),
    "json": lambda frame, file: frame.to_json(file, orient="records"),
}


@pytest.mark.parametrize("ending", FORMS)
def test_a_folder_a_pattern_and_one_file_give_the_same_rows(shop: Shop, ending: str) -> None:
    usual = rows(shop, land(shop))
    frame = typed() if ending == "parquet" else orders()
    for name, part in monthly(frame).items():
        FORMS[ending](part, shop.repo / "raw" / "orders" / f"{name}.{ending}")
    (shop.repo / "raw" / "orders" / "_SUCCESS").touch()
    (shop.repo / "raw" / "orders" / "next.parquet.tmp").write_text("half")
    FORMS[ending](frame, shop.repo / "raw" / f"one.{ending}")
    names = ["raw/orders.csv", "raw/orders/", f"raw/o*/*.{ending}", f"raw/one.{ending}"]
    for before, uri in pairwise(names):
        shop.replace("use_case.yaml", f"uri: {before}", f"uri: {uri}")
        pd.testing.assert_frame_equal(rows(shop, land(shop)), usual)


def test_names_of_folders_are_columns(shop: Shop) -> None:
    usual = rows(shop, land(shop))
    for customer, part in typed().groupby("customer"):
        folder = shop.repo / "raw" / "orders" / f"customer={customer}"
        folder.mkdir()
        part.drop(columns="customer").to_parquet(folder / "part.parquet")
    source(shop, "raw/orders/")
    pd.testing.assert_frame_equal(rows(shop, land(shop)), usual)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_files_that_differ_are_both_named(shop: Shop, ending: str) -> None:
    parts = monthly(typed())
    folder = shop.repo / "raw" / "orders"
    FORMS[ending](parts[MONTHS[0]], folder / f"a.{ending}")
    source(shop, "raw/orders/")
    FORMS[ending](parts[MONTHS[1]].drop(columns="items"), folder / f"b.{ending}")
    missing = rf"items are missing; a\.{ending} has them, but b\.{ending} has order_id"
    with pytest.raises(DataContractError, match=missing):
        land(shop)
    FORMS[ending](parts[MONTHS[1]].assign(items="2"), folder / f"b.{ending}")
    if ending == "parquet":
        differ = r"items is int64 in a\.parquet and string in b\.parquet"
        with pytest.raises(DataContractError, match=differ):
            land(shop)
    (folder / f"c.{'csv' if ending == 'parquet' else 'jsonl'}").write_text("{}")
    with pytest.raises(DataContractError, match="expected files of one format"):
        land(shop)
    (folder / "notes.md").write_text("Ours.")
    with pytest.raises(ConfigurationError, match=r"holds notes\.md"):
        land(shop)
    assert not list(shop.store.root.glob("landed/*"))


def test_a_column_without_a_value_in_one_file_has_the_type_of_the_others(shop: Shop) -> None:
    parts = monthly(typed())
    parts[MONTHS[0]].assign(items=None).to_parquet(shop.repo / "raw" / "orders" / "a.parquet")
    parts[MONTHS[1]].to_parquet(shop.repo / "raw" / "orders" / "b.parquet")
    source(shop, "raw/orders/")
    landed = rows(shop, land(shop))
    assert landed["items"].isna().sum() == len(parts[MONTHS[0]])
    assert landed["items"].sum() == parts[MONTHS[1]]["items"].sum()


def test_a_window_needs_only_the_files_that_hold_its_rows(shop: Shop) -> None:
    folder, parts = shop.repo / "raw" / "orders", monthly(typed())
    source(shop, "raw/orders/*.parquet")
    sizes, first = [], None
    for number, name in enumerate(MONTHS):
        parts[name].to_parquet(folder / f"{name}.parquet")
        landed = land(shop, month(number))
        assert len(rows(shop, landed)) == len(parts[name])
        sizes.append((folder / f"{name}.parquet").stat().st_size)
        assert seen(landed).num_bytes == sizes[-1]
        first = first or landed
    assert land(shop, month(0)) == first
    late = parts[MONTHS[0]].head(1).assign(order_id=9999)
    late.to_parquet(folder / "late.parquet")
    again = land(shop, month(0))
    assert seen(again).sha256 != seen(first).sha256
    assert set(rows(shop, again)["order_id"]) - set(rows(shop, first)["order_id"]) == {9999}


def test_a_file_that_changes_while_it_is_read_is_read_again_later(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shop.repo / "raw" / "orders.csv"

    def opened(*arguments: Any) -> Source:
        found = open_source(*arguments)

        def bring() -> Any:
            files = found.bring()
            if arguments[0].name == "orders":
                with file.open("a") as stream:
                    stream.write("601,c01,2024-01-05T00:00:00Z,1,5.0\n")
            return files

        return replace(found, bring=bring)

    open_source = landing.open_source
    monkeypatch.setattr(landing, "open_source", opened)
    with pytest.raises(TransientError, match="changed while it was read"):
        land(shop)
    assert not list(shop.store.root.glob("landed/*"))
    monkeypatch.undo()
    assert len(rows(shop, land(shop))) == 601


@pytest.mark.parametrize("uri", ["raw/nothing.csv", "raw/*.parquet", "raw/none/", "ftp://x/a.csv"])
def test_what_names_nothing_is_told_so(shop: Shop, uri: str) -> None:
    source(shop, uri)
    with pytest.raises(ConfigurationError, match="raw table orders"):
        land(shop)
