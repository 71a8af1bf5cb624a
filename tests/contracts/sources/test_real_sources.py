"""Raw rows from S3, PostgreSQL, the web, Delta Lake and Iceberg, each a real one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psycopg
import pyarrow as pa
import pytest
import yaml

from falaj.onboarding.checks import check_project
from falaj.onboarding.project import begin
from falaj.onboarding.proposal import Wishes
from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tests.support.data.shop import orders
from tests.support.services.listeners import Answer, Asked, http_listener
from tests.support.services.raw_sources import (
    MONTHS,
    SourceShop,
    month,
    monthly,
    seen,
    typed_orders,
)
from tests.support.services.servers import new_database
from tests.support.state import s3_of_environment

COLUMNS = "order_id bigint, customer text, ordered timestamptz, items int, amount numeric"


@pytest.fixture
def shop(tmp_path: Path) -> SourceShop:
    return SourceShop(tmp_path)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    import boto3

    with s3_of_environment("shop") as address:
        yield boto3.resource("s3", endpoint_url=address, region_name="us-east-1").Bucket("shop")


@pytest.fixture
def bucket(s3: Any) -> Any:
    """An empty one."""
    s3.objects.all().delete()
    return s3


def upload(bucket: Any, name: str, rows: pd.DataFrame) -> int:
    body = rows.to_parquet()
    bucket.put_object(Key=name, Body=body)
    return len(body)


def test_a_window_reads_only_its_objects_of_s3(shop: SourceShop, bucket: Any) -> None:
    usual = shop.rows(shop.read())
    sizes = [upload(bucket, f"o/{m}.parquet", rows) for m, rows in monthly(typed_orders()).items()]
    pd.testing.assert_frame_equal(shop.rows(shop.read("s3://shop/o/*.parquet")), usual)
    first = shop.read("s3://shop/o/", month(1))
    assert seen(first).num_bytes == sizes[1]
    upload(
        bucket,
        "o/2024-07.parquet",
        typed_orders().assign(ordered=pd.Timestamp("2024-07-01", tz="UTC")),
    )
    assert shop.read(window=month(1)) == first
    upload(bucket, "o/late.parquet", monthly(typed_orders())[MONTHS[1]].head(1).assign(order_id=-1))
    late = shop.read(window=month(1))
    assert late.tables[0].num_rows == first.tables[0].num_rows + 1


def test_other_formats_and_folders_of_s3_are_read_too(shop: SourceShop, bucket: Any) -> None:
    usual = shop.rows(shop.read())
    for name, rows in monthly(orders()).items():
        bucket.put_object(Key=f"c/{name}.csv", Body=rows.to_csv(index=False).encode())
    pd.testing.assert_frame_equal(shop.rows(shop.read("s3://shop/c/")), usual)
    for name, rows in list(typed_orders().groupby("customer"))[:5]:
        upload(bucket, f"p/customer={name}/a.parquet", rows.drop(columns="customer"))
    by_folder = shop.rows(shop.read("s3://shop/p/"))
    assert set(by_folder["customer"]) == {f"c0{number}" for number in range(5)}


def test_what_s3_lacks_or_withholds_is_told(
    shop: SourceShop, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="no bucket 'nowhere'"):
        shop.read("s3://nowhere/a.parquet")
    with pytest.raises(ConfigurationError, match="names no file"):
        shop.read("s3://shop/none/*.parquet")
    upload(bucket, "o/a.parquet", typed_orders().drop(columns="items"))
    with pytest.raises(DataContractError, match="items are missing; the file has order_id"):
        shop.read("s3://shop/o/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match="NETWORK_CONNECTION"):
        shop.read()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio.example")
    with pytest.raises(ConfigurationError, match="expected https://"):
        shop.read()


@pytest.fixture
def database(postgres: str) -> Iterator[tuple[str, psycopg.Connection]]:
    uri = new_database(postgres)
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE orders ({COLUMNS})")
        with connection.cursor().copy("COPY orders FROM STDIN (FORMAT csv)") as copy:
            copy.write(orders().to_csv(index=False, header=False))
        yield uri.removesuffix("?sslmode=disable"), connection


def test_a_window_of_a_table_of_postgresql_is_read_in_one_snapshot(
    shop: SourceShop, database: tuple[str, psycopg.Connection]
) -> None:
    usual, (uri, connection) = shop.rows(shop.read()), database
    pd.testing.assert_frame_equal(shop.rows(shop.read(f"{uri}/public.orders")), usual)
    first = shop.read(window=month(1))
    connection.execute("UPDATE orders SET amount = 0 WHERE ordered < '2024-02-01'")
    connection.execute("INSERT INTO orders SELECT 900, 'c01', '2024-03-01Z', 1, 5")
    assert shop.read(window=month(1)) == first
    connection.execute("INSERT INTO orders SELECT 901, 'c01', '2024-02-01Z', 1, 5")
    late = shop.read(window=month(1))
    assert set(shop.rows(late)["order_id"]) - set(shop.rows(first)["order_id"]) == {901}
    (shop.repo / "source.sql").write_text("SELECT * FROM orders WHERE order_id < 900;\n")
    narrow = shop.read(f"{uri}?query=source.sql", month(1))
    assert narrow.tables[0].num_rows == first.tables[0].num_rows
    connection.execute("ALTER TABLE orders ALTER ordered TYPE timestamp USING ordered")
    with pytest.raises(DataContractError, match="no time with a time zone"):
        shop.read(f"{uri}/orders", month(1))
    shop.source(f"{uri}/orders", time_zone="UTC")
    pd.testing.assert_frame_equal(shop.rows(shop.read(window=month(1))), shop.rows(late))


@pytest.mark.parametrize("user", ["", "postgres@"])
def test_a_server_of_this_machine_is_reached_by_its_socket(
    shop: SourceShop, database: tuple[str, psycopg.Connection], user: str
) -> None:
    server = database[1].info
    (folder,) = database[1].execute("SHOW unix_socket_directories").fetchone() or ()
    options = f"host={folder}&port={server.port}{'' if user else '&user=postgres'}"
    landed = shop.read(f"postgresql://{user}/{server.dbname}/orders?{options}")
    assert landed.tables[0].num_rows == 600


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("/orders", "/nothing"), 'relation "nothing" does not exist'),
        (("@127.0.0.1", "nobody@127.0.0.1"), 'role "postgresnobody" does not exist'),
        (("/orders", ""), "names neither a table"),
        (("/orders", "?query=none.sql"), "no file 'none.sql'"),
    ],
)
def test_what_postgresql_refuses_is_told(
    shop: SourceShop, database: tuple[str, psycopg.Connection], change: tuple[str, str], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        shop.read(f"{database[0]}/orders".replace(*change))


def test_a_password_comes_from_the_environment_and_is_never_told(
    shop: SourceShop, database: tuple[str, psycopg.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = database[0]
    with pytest.raises(ConfigurationError) as refused:
        shop.read(uri.replace("postgres@", "postgres:hidden@") + "/orders")
    assert "hidden" not in str(refused.value)
    monkeypatch.setenv("FALAJ_ORDERS_URL", uri.replace("postgres@", "postgres:hidden@"))
    assert shop.read("postgres://elsewhere/db/orders").tables[0].num_rows == 600
    away = "postgres://postgres:hidden@127.0.0.1:9/db"
    monkeypatch.setenv("FALAJ_ORDERS_URL", away)
    with pytest.raises(TransientError, match="does not answer") as away_told:
        shop.read()
    assert "hidden" not in str(away_told.value)
    monkeypatch.delenv("FALAJ_ORDERS_URL")
    with pytest.raises(ConfigurationError, match=r"elsewhere with sslmode\s+unset"):
        shop.read()
    with pytest.raises(ConfigurationError, match="names no host"):
        shop.read("postgres:///db/orders")
    monkeypatch.setenv("PGHOSTADDR", "10.0.0.1")
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1 with sslmode"):
        shop.read("postgres://localhost/db/orders")


def begun(folder: Path, data: str) -> Any:
    """What `falaj init` writes of the orders at an address; the project has no mistake."""
    unsaid = dict.fromkeys(("label_known_after", "horizon", "time_zone", "ask"))
    wishes = Wishes(label="amount", time="ordered", key="customer", template="table", **unsaid)  # type: ignore[arg-type]
    begin(folder, data, wishes)
    errors = [f.lines() for f in check_project(folder).findings if f.severity == "error"]
    assert errors == []
    return yaml.safe_load((folder / "use_case.yaml").read_text())["features"]["raw_tables"][0]


def test_a_project_begins_with_rows_of_s3_postgresql_or_the_web(
    tmp_path: Path, bucket: Any, database: tuple[str, psycopg.Connection]
) -> None:
    for name, rows in monthly(typed_orders()).items():
        upload(bucket, f"orders/{name}.parquet", rows)
    of_s3 = begun(tmp_path / "a", "s3://shop/orders/*.parquet")
    of_postgres = begun(tmp_path / "b", f"{database[0]}/public.orders")
    with http_listener(give_orders) as address:
        of_web = begun(tmp_path / "c", f"{address}/orders.csv")
    assert of_s3["uri"] == "s3://shop/orders/*.parquet"
    for table in (of_s3, of_postgres, of_web):
        assert (table["name"], table["key"]) == ("orders", ["order_id"])
        assert table["columns"]["amount"] == "DOUBLE"
    with pytest.raises(ConfigurationError, match="PGPASSWORD"):
        begun(tmp_path / "d", "postgres://me:hidden@127.0.0.1/shop/orders")
    assert not (tmp_path / "d").exists()


def give_orders(asked: Asked) -> Answer:
    """Answers by the path that is asked for."""
    body = orders().to_csv(index=False).encode()
    if asked.path == "/moved.csv":
        return 302, "text/plain", b"http://elsewhere.example/orders.csv"
    return {"/gone.csv": 404, "/busy.csv": 503}.get(asked.path, 200), "text/csv", body


def test_a_file_of_a_web_server_is_read_whole_or_not_at_all(
    shop: SourceShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = shop.rows(shop.read())
    with http_listener(give_orders, lacking=9) as address:
        with pytest.raises(TransientError, match="did not answer to the end"):
            shop.read(f"{address}/orders.csv")
    with http_listener(give_orders) as address:
        pd.testing.assert_frame_equal(shop.rows(shop.read(f"{address}/orders.csv")), usual)
        with pytest.raises(ConfigurationError, match="answers 404"):
            shop.read(f"{address}/gone.csv")
        with pytest.raises(TransientError, match="answers 503"):
            shop.read(f"{address}/busy.csv")
        with pytest.raises(ConfigurationError, match=r"http://elsewhere\.example, where"):
            shop.read(f"{address}/moved.csv")
        monkeypatch.setattr("tasks.features.tables.remote.LARGEST_DOWNLOAD_BYTES", 1000)
        with pytest.raises(ConfigurationError, match="more than"):
            shop.read(f"{address}/orders.csv")
    with pytest.raises(TransientError, match="ConnectError"):
        shop.read()


@pytest.mark.parametrize("storage", ["file", "s3"])
def test_a_table_of_delta_lake_is_read_in_one_version(
    shop: SourceShop, bucket: Any, storage: str
) -> None:
    import deltalake

    usual = shop.rows(shop.read())
    where = {"file": str(shop.folder), "s3": "s3://shop/lake"}[storage]
    options = {"aws_endpoint": bucket.meta.client.meta.endpoint_url, "allow_http": "true"}
    for rows in monthly(typed_orders()).values():
        table = pa.Table.from_pandas(rows.assign(till="a / b"), preserve_index=False)
        deltalake.write_deltalake(
            where, table, partition_by=["till"], mode="append", storage_options=options
        )
    uri = {"file": "delta+file://raw/orders", "s3": "delta+s3://shop/lake"}[storage]
    whole = shop.read(uri)
    pd.testing.assert_frame_equal(shop.rows(whole), usual)
    assert seen(whole).uri == f"{uri}@5"
    assert seen(shop.read(window=month(2))).num_bytes < seen(whole).num_bytes / 4
    deltalake.DeltaTable(where, storage_options=options).delete("order_id > 9")
    assert seen(shop.read()).uri == f"{uri}@6"
    assert shop.read().tables[0].num_rows == 10
    pinned = shop.read(f"{uri}@5")
    pd.testing.assert_frame_equal(shop.rows(pinned), usual)
    with pytest.raises(ConfigurationError, match="in a version that is there"):
        shop.read(f"{uri}@99")
    if storage == "file":
        for uri in ("raw/orders/", "raw/orders/*.parquet"):
            with pytest.raises(ConfigurationError, match="is a table of Delta"):
                shop.read(uri)


def test_a_table_of_iceberg_is_read_in_one_snapshot(
    shop: SourceShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    usual = shop.rows(shop.read())
    address = f"sqlite:///{shop.folder}/catalog.db"
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", address)
    catalog = SqlCatalog("lake", uri=address, warehouse=shop.folder.as_uri())
    catalog.create_namespace("shop")
    moments = typed_orders()["ordered"].astype("datetime64[us, UTC]")
    first = pa.Table.from_pandas(typed_orders().assign(ordered=moments), preserve_index=False)
    table = catalog.create_table("shop.orders", schema=first.schema)
    table.append(first.slice(0, 300))
    table.append(first.slice(300))
    uri = "iceberg+catalog://lake/shop.orders"
    whole = shop.read(uri)
    pd.testing.assert_frame_equal(shop.rows(whole), usual)
    snapshots = [snapshot.snapshot_id for snapshot in table.snapshots()]
    assert seen(whole).uri == f"{uri}@{snapshots[-1]}"
    assert shop.read(f"{uri}@{snapshots[0]}").tables[0].num_rows == 300
    assert seen(shop.read(uri, month(0))).num_bytes < seen(whole).num_bytes
    metadata = table.metadata_location.removeprefix("file://")
    pd.testing.assert_frame_equal(shop.rows(shop.read(f"iceberg+file://{metadata}")), usual)
    with pytest.raises(ConfigurationError, match="Table does not exist"):
        shop.read("iceberg+catalog://lake/shop.nothing")
    catalog.create_table("shop.narrow", schema=first.drop("items").schema).append(
        first.slice(0, 9).drop("items")
    )
    with pytest.raises(DataContractError, match="items are missing; it has order_id"):
        shop.read("iceberg+catalog://lake/shop.narrow")
    catalog.close()


@pytest.mark.parametrize(
    ("module", "uri", "extra"),
    [
        ("adbc_driver_postgresql", "postgres://h/d/t", "postgres"),
        ("deltalake", "delta+file://a", "lake"),
        ("pyiceberg", "iceberg+catalog://a/b.c", "lake"),
    ],
)
def test_a_source_whose_package_is_absent_says_how_to_get_it(
    shop: SourceShop, monkeypatch: pytest.MonkeyPatch, module: str, uri: str, extra: str
) -> None:
    for name in {module, *(name for name in sys.modules if name.startswith(module))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'falaj\[{extra}\]'"):
        shop.read(uri)
