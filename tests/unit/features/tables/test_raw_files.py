"""Files as strangers write them: what cannot be read is told with its line, column and cure."""

import gzip
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pandas as pd
import pytest

from flows.config import read_pipeline_config
from tasks.kernel.errors import ConfigurationError, DataContractError
from tests.support.data.shop import Shop, orders

HEADER = "order_id,customer,ordered,items,amount"
ROW = "3,c01,2024-01-05T00:00:00Z,1,5.0"


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def lines() -> list[str]:
    return orders().to_csv(index=False).splitlines()


def land(shop: Shop, content: str | bytes) -> pd.DataFrame:
    """Orders as they landed from a file with this content."""
    raw = content.encode() if isinstance(content, str) else content
    (shop.repo / "raw" / "orders.csv").write_bytes(raw)
    landed = next(t for t in shop.land().tables if t.name == "orders")
    return pd.read_parquet(shop.store.path(landed.artifact))


def refusal(shop: Shop, content: str | bytes) -> str:
    with pytest.raises(DataContractError, match="raw table orders") as refused:
        land(shop, content)
    assert not list(shop.store.root.glob("landed/*"))
    return str(refused.value)


def test_columns_of_any_name_are_renamed(shop: Shop) -> None:
    usual = land(shop, "\n".join(lines()))
    rename = "rename: {userId: customer, Order Date: ordered}\n      suite: raw_orders"
    shop.replace("use_case.yaml", "suite: raw_orders", rename)
    text = "\n".join(lines()).replace("customer,ordered", "userId,Order Date", 1)
    pd.testing.assert_frame_equal(land(shop, text), usual)


@pytest.mark.parametrize("unit", ["s", "ns"])
@pytest.mark.parametrize("zone", ["", "time_zone: America/New_York\n      "])
def test_moments_of_parquet_stay_what_they_are_in_any_resolution(
    shop: Shop, unit: str, zone: str
) -> None:
    usual = land(shop, "\n".join(lines()))
    moments = pd.to_datetime(orders()["ordered"]).astype(f"datetime64[{unit}, UTC]")
    written = orders().drop(columns="ordered").assign(When=moments)
    written.to_parquet(shop.repo / "raw" / "orders.parquet")
    shop.replace("use_case.yaml", "raw/orders.csv", "raw/orders.parquet")
    renamed = f"rename: {{When: ordered}}\n      {zone}suite: raw_orders"
    shop.replace("use_case.yaml", "suite: raw_orders", renamed)
    pd.testing.assert_frame_equal(land(shop, ""), usual)


@pytest.mark.parametrize("rename", ["{userId: user}", "{a: customer, b: customer}"])
def test_a_renaming_to_no_declared_column_or_twice_is_refused(shop: Shop, rename: str) -> None:
    shop.replace("use_case.yaml", "suite: raw_orders", f"rename: {rename}\n      suite: raw_orders")
    with pytest.raises(ConfigurationError, match="raw table orders: rename gives"):
        read_pipeline_config(shop.repo)


def test_a_name_that_is_spelled_otherwise_or_stands_twice_is_refused(shop: Shop) -> None:
    told = refusal(shop, "\n".join(lines()).replace("customer", '"Customer"', 1))
    assert "customer are missing; the file has order_id, Customer, ordered" in told
    told = refusal(shop, f"{HEADER},Customer\n{ROW},c02\n")
    assert "customer stand more than once" in told
    assert len(land(shop, f"{HEADER},note,note,amount_1\n{ROW},a,b,1\n")) == 1


def test_several_texts_may_stand_for_nothing(shop: Shop) -> None:
    odd = [HEADER, ROW, "4,c01,2024-01-05T00:00:00Z,,", "5,c01,2024-01-05T00:00:00Z,NA,n/a"]
    told = refusal(shop, "\n".join(odd))
    assert "such as 'NA'" in told
    assert "null_text (now '')" in told
    shop.replace("use_case.yaml", 'null_text: ""\n      key: [order_id]',
                 'null_text: ["", NA, n/a]\n      key: [order_id]')  # fmt: skip
    assert land(shop, "\n".join(odd))["amount"].isna().sum() == 2


@pytest.mark.parametrize("place", [300, None])
@pytest.mark.parametrize("line", ["1,2,3,4,5,6,7", "1,2"])
def test_a_line_of_another_form_is_told_by_its_number(
    shop: Shop, line: str, place: int | None
) -> None:
    """Early in the file, and beyond the rows by which DuckDB judges its form."""
    rows = lines() if place else [HEADER, *lines()[1:] * 40]
    rows.insert(place or len(rows), line)
    told = refusal(shop, "\n".join(rows) + "\n")
    assert "CSV Error on Line: " in told
    assert "Expected Number of Columns: 5" in told


def test_another_encoding_than_utf_8_is_told_with_its_line(shop: Shop) -> None:
    text = "\n".join([HEADER, *lines()[1:] * 40, ROW.replace("c01", "ç")])
    told = refusal(shop, text.encode("latin-1"))
    assert f"Line: {600 * 40 + 2}" in told
    assert "UTF-8" in told


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_a_header_is_told_so(shop: Shop, content: bytes) -> None:
    assert "no line with the names of its columns" in refusal(shop, content)


@pytest.mark.parametrize(
    "written",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace(",", ";"),
        lambda text: text.replace("\n", "\r"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace(HEADER, HEADER.replace(",", ", ")),
        lambda text: "# made by hand, on paper\n" + text,
        lambda text: text.replace("\n", ',"a \\"b\\", c"\n').replace('"a \\"b\\", c"', "note", 1),
    ],
    ids=["BOM", "semicolons", "CR", "CRLF", "spaces", "comment", "backslashes"],
)
def test_other_forms_of_a_csv_are_read(shop: Shop, written: Callable[[str], str]) -> None:
    text = "\n".join([*lines(), ""])
    pd.testing.assert_frame_equal(land(shop, written(text)), land(shop, text))


def zipped(text: str) -> bytes:
    with BytesIO() as content:
        with ZipFile(content, "w") as archive:
            archive.writestr("orders.csv", text)
        return content.getvalue()


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("ZIP", zipped), ("csv.gz", lambda text: gzip.compress(text.encode()))],
    ids=["zip", "gzip"],
)
def test_a_packed_csv_is_read_and_half_of_one_is_told_so(
    shop: Shop, ending: str, pack: Callable[[str], bytes]
) -> None:
    shop.replace("use_case.yaml", "raw/orders.csv", f"raw/orders.{ending}")
    file, packed = shop.repo / "raw" / f"orders.{ending}", pack("\n".join(lines()))
    for wrong in (packed[:-20], packed[:12] + b"x" * 99, b"no archive"):
        file.write_bytes(wrong)
        with pytest.raises(DataContractError, match="cannot be unpacked"):
            shop.land()
    file.write_bytes(packed)
    assert next(t.num_rows for t in shop.land().tables if t.name == "orders") == 600


def test_lines_that_end_in_a_bare_cr_and_differ_in_form_are_told(shop: Shop) -> None:
    assert "cannot be read" in refusal(shop, "\r".join([HEADER, "1,2", ROW, "1,2,3,4,5,6,7", ROW]))


def test_a_name_that_cannot_be_declared_is_told_with_its_renaming(shop: Shop) -> None:
    shop.replace("use_case.yaml", "customer: VARCHAR", "userId: VARCHAR")
    with pytest.raises(ConfigurationError, match=r"rename: \{userId: user_id\}"):
        read_pipeline_config(shop.repo)
