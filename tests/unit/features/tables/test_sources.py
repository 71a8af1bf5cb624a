"""Many files as one table, and what of them a window needs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tasks.features.tables import landing
from tasks.features.tables.copies import Source
from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tests.support.data.shop import orders
from tests.support.services.raw_sources import (
    MONTHS,
    SourceShop,
    month,
    monthly,
    seen,
    typed_orders,
)


@pytest.fixture
def shop(tmp_path: Path) -> SourceShop:
    return SourceShop(tmp_path)


FORMS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "csv": lambda frame, file: frame.to_csv(file, index=False),
    "csv.gz": lambda frame, file: frame.to_csv(file, index=False),
    "parquet": lambda frame, file: frame.to_parquet(file),
    "jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True),
    "json": lambda frame, file: frame.to_json(file, orient="records"),
}


@pytest.mark.parametrize("ending", FORMS)
def test_a_folder_a_pattern_and_one_file_give_the_same_rows(shop: SourceShop, ending: str) -> None:
    usual = shop.rows(shop.read())
    frame = typed_orders() if ending == "parquet" else orders()
    for name, part in monthly(frame).items():
        FORMS[ending](part, shop.folder / f"{name}.{ending}")
    (shop.folder / "_SUCCESS").touch()
    (shop.folder / "next.parquet.tmp").write_text("half")
    FORMS[ending](frame, shop.repo / "raw" / f"one.{ending}")
    for uri in ("raw/orders/", f"raw/o*/*.{ending}", f"raw/one.{ending}"):
        pd.testing.assert_frame_equal(shop.rows(shop.read(uri)), usual)


def test_names_of_folders_are_columns(shop: SourceShop) -> None:
    usual = shop.rows(shop.read())
    for customer, part in typed_orders().groupby("customer"):
        folder = shop.folder / f"customer={customer}"
        folder.mkdir()
        part.drop(columns="customer").to_parquet(folder / "part.parquet")
    shop.source("raw/orders/")
    pd.testing.assert_frame_equal(shop.rows(shop.read()), usual)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_files_that_differ_are_both_named(shop: SourceShop, ending: str) -> None:
    parts = monthly(typed_orders())
    folder = shop.folder
    FORMS[ending](parts[MONTHS[0]], folder / f"a.{ending}")
    shop.source("raw/orders/")
    FORMS[ending](parts[MONTHS[1]].drop(columns="items"), folder / f"b.{ending}")
    missing = rf"items are missing; a\.{ending} has them, but b\.{ending} has order_id"
    with pytest.raises(DataContractError, match=missing):
        shop.read()
    FORMS[ending](parts[MONTHS[1]].assign(items="2"), folder / f"b.{ending}")
    if ending == "parquet":
        differ = r"items is int64 in a\.parquet and string in b\.parquet"
        with pytest.raises(DataContractError, match=differ):
            shop.read()
    (folder / f"c.{'csv' if ending == 'parquet' else 'jsonl'}").write_text("{}")
    with pytest.raises(DataContractError, match="expected files of one format"):
        shop.read()
    (folder / "notes.md").write_text("Ours.")
    with pytest.raises(ConfigurationError, match=r"holds notes\.md"):
        shop.read()
    assert not list(shop.store.root.glob("landed/*"))


def test_a_column_without_a_value_in_one_file_has_the_type_of_the_others(shop: SourceShop) -> None:
    parts = monthly(typed_orders())
    parts[MONTHS[0]].assign(items=None).to_parquet(shop.folder / "a.parquet")
    parts[MONTHS[1]].to_parquet(shop.folder / "b.parquet")
    shop.source("raw/orders/")
    landed = shop.rows(shop.read())
    assert landed["items"].isna().sum() == len(parts[MONTHS[0]])
    assert landed["items"].sum() == parts[MONTHS[1]]["items"].sum()


def test_a_window_needs_only_the_files_that_hold_its_rows(shop: SourceShop) -> None:
    folder, parts = shop.folder, monthly(typed_orders())
    shop.source("raw/orders/*.parquet")
    sizes, first = [], None
    for number, name in enumerate(MONTHS):
        parts[name].to_parquet(folder / f"{name}.parquet")
        landed = shop.read(window=month(number))
        assert len(shop.rows(landed)) == len(parts[name])
        sizes.append((folder / f"{name}.parquet").stat().st_size)
        assert seen(landed).num_bytes == sizes[-1]
        first = first or landed
    assert shop.read(window=month(0)) == first
    parts[MONTHS[0]].head(1).assign(order_id=9999).to_parquet(folder / "late.parquet")
    again = shop.read(window=month(0))
    assert seen(again).sha256 != seen(first).sha256
    assert set(shop.rows(again)["order_id"]) - set(shop.rows(first)["order_id"]) == {9999}


def test_a_file_that_changes_while_it_is_read_is_read_again_later(
    shop: SourceShop, monkeypatch: pytest.MonkeyPatch
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
        shop.read()
    assert not list(shop.store.root.glob("landed/*"))
    monkeypatch.undo()
    assert len(shop.rows(shop.read())) == 601


@pytest.mark.parametrize("uri", ["raw/nothing.csv", "raw/*.parquet", "raw/none/", "ftp://x/a.csv"])
def test_what_names_nothing_is_told_so(shop: SourceShop, uri: str) -> None:
    shop.source(uri)
    with pytest.raises(ConfigurationError, match="raw table orders"):
        shop.read()
