"""Offline pushes keep every row; Feast's own code finds the tables where retrieval does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feast import Entity, FeatureStore, FeatureView, FileSource, ValueType

from tasks.features.access.guarded_store import GuardedFeatureStore
from tasks.features.offline.store import AsofDuckDBOfflineStore
from tasks.kernel.errors import FeatureStoreError, WindowError
from tests.support.data.asof import START, feast_in, values, view_of, write_rows


@pytest.fixture(scope="module")
def feast_store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return feast_in(tmp_path_factory.mktemp("feast"))


def test_rows_that_are_pushed_at_once_are_all_kept(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    path = write_rows(values(("a", 0, 0, 0.0)), tmp_path / "rows.parquet")
    view, schema = view_of(path), pq.read_schema(path)

    def push(number: int) -> None:
        rows = pa.Table.from_pandas(values(("a", number, number, float(number)))).select(
            schema.names
        )
        AsofDuckDBOfflineStore.offline_write_batch(feast_store.config, view, rows, None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(push, range(1, 21)))
    assert sorted(pq.read_table(path)["value"].to_pylist()) == [float(n) for n in range(21)]
    assert {file.name for file in tmp_path.iterdir()} <= {"rows.parquet", "rows.parquet.lock"}


def test_a_push_of_other_columns_or_of_tomorrow_changes_nothing(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    path = write_rows(values(("a", 0, 0, 0.0)), tmp_path / "rows.parquet")
    before = path.read_bytes()
    good = pa.Table.from_pandas(values(("a", 1, 1, 1.0)))
    late = good.to_pandas().assign(at=pd.Timestamp.now("UTC") + pd.Timedelta(days=1))
    for rows, error in ((good.drop_columns("value"), FeatureStoreError), (late, WindowError)):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pandas(rows)
        with pytest.raises(error, match="values"):
            AsofDuckDBOfflineStore.offline_write_batch(
                feast_store.config, view_of(path), table, None
            )
    assert path.read_bytes() == before


def test_feasts_own_figures_are_of_the_tables_that_retrieval_reads(tmp_path: Path) -> None:
    (tmp_path / "tables" / "values").mkdir(parents=True)
    feast = feast_in(tmp_path / "tables")
    feast.config.repo_path = tmp_path
    write_rows(values(("a", 5, 5, 1.0)), tmp_path / "tables" / "values" / "part.parquet")
    source = view_of("values").batch_source
    newest = AsofDuckDBOfflineStore.get_monitoring_max_timestamp(feast.config, source, "at")
    assert newest == START + timedelta(minutes=5)
    (figures,) = AsofDuckDBOfflineStore.compute_monitoring_metrics(
        feast.config, source, [("value", "numeric")], "at"
    )
    assert figures["row_count"] == 1


def test_a_schema_is_inferred_from_the_tables_that_retrieval_reads(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    write_rows(values(("a", 5, 5, 1.0)), tables / "values.parquet")
    config = feast_in(tables).config.model_copy(update={"repo_path": tmp_path})
    feast = GuardedFeatureStore(config, tmp_path)
    key = Entity(name="k0", join_keys=["k0"], value_type=ValueType.STRING)
    source = FileSource(path="values.parquet", timestamp_field="at")
    feast.apply([key, FeatureView(name="values", entities=[key], source=source)])
    assert {f.name for f in feast.get_feature_view("values").features} == {"value", "created"}
    assert feast.config.repo_path == tmp_path
