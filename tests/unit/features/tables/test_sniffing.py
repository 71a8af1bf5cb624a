"""What is proposed for files that nobody has described."""

import gzip
from pathlib import Path

import pandas as pd
import pytest

from tasks.features.tables.sniffing import SniffedColumn, sniff
from tasks.kernel.errors import ConfigurationError, DataContractError

CSV = """Order Date;Customer ID;amount;paid;zip;country
2024-01-05 10:00:00;7;1.5;true;00100;NA
2024-01-06 11:30:00;8;n/a;false;13001;OM
2024-01-07 12:00:00;;2;true;13002;
"""


def columns(path: Path) -> dict[str, SniffedColumn]:
    return {column.name: column for column in sniff(path).columns}


def test_a_csv_is_proposed_with_names_types_and_texts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text(CSV)
    table = sniff(tmp_path / "orders.csv")
    assert (table.format, table.delimiter, table.num_rows) == ("CSV", ";", 3)
    assert {c.name: c.type for c in table.columns} == {
        "order_date": "TIMESTAMPTZ",
        "customer_id": "BIGINT",
        "amount": "DOUBLE",
        "paid": "BOOLEAN",
        "zip": "VARCHAR",
        "country": "VARCHAR",
    }
    assert table.rename == {"Order Date": "order_date", "Customer ID": "customer_id"}
    assert table.null_text == ("", "n/a")
    seen = columns(tmp_path / "orders.csv")
    assert not seen["order_date"].has_zone
    assert seen["country"].examples == ("NA", "OM")
    assert (seen["customer_id"].num_missing, seen["customer_id"].num_distinct) == (1, 2)


def test_other_formats_are_looked_at_alike(tmp_path: Path) -> None:
    moments = pd.to_datetime(["2024-01-01", "2024-01-02"], utc=True)
    frame = pd.DataFrame({"at": moments, "n": [1, 2], "text": ["a", None]})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True, date_format="iso")
    frame.to_json(tmp_path / "a.json", orient="records", date_format="iso")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    for file in ("a.parquet", "a.jsonl", "a.json", "a.json.gz"):
        seen = columns(tmp_path / file)
        told = {name: column.type for name, column in seen.items()}
        assert told == {"at": "TIMESTAMPTZ", "n": "BIGINT", "text": "VARCHAR"}, file
        assert seen["at"].has_zone
        assert seen["text"].num_missing == 1


def test_names_that_would_be_the_same_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Order Total,order_total,2nd\n1,2,3\n")
    assert list(columns(tmp_path / "a.csv")) == ["order_total", "order_total_2", "column_2nd"]


def test_a_folder_is_told_by_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,waited\n1,0\n")
    (tmp_path / "2.csv").write_text("waited;a\n3.5;n/a\n0;2\n")
    assert sniff(tmp_path).num_files == sniff(f"{tmp_path}/*.csv").num_files == 2
    seen = columns(tmp_path)
    assert (seen["a"].type, seen["a"].null_texts) == ("BIGINT", ("n/a",))
    assert (seen["waited"].type, seen["waited"].num_distinct) == ("DOUBLE", 2)


@pytest.mark.parametrize("content", ["", "PAR1"])
def test_what_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / ("a.parquet" if content else "a.csv")
    file.write_text(content)
    with pytest.raises(DataContractError):
        sniff(file)
    with pytest.raises(ConfigurationError, match="names no file"):
        sniff(tmp_path / "b.csv")
