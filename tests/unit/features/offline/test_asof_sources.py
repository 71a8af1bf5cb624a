"""Sources on S3, and results that become a file: whole or not at all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feast import FeatureStore
from feast.infra.offline_stores.file_source import SavedDatasetFileStorage
from feast.infra.offline_stores.offline_store import RetrievalJob
from pyarrow.fs import FileSystem, S3FileSystem

from tasks.features.offline.job import AsofRetrievalJob, Rows
from tasks.kernel.errors import FeatureStoreError
from tests.support.data import asof
from tests.support.services.servers import s3_server

ROWS = asof.values(("a", 0, 0, 1.0), ("a", 10, 10, 2.0), ("b", 30, 30, 3.0))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield endpoint


@pytest.fixture(scope="module")
def s3(endpoint: str) -> FileSystem:
    filesystem = S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True)
    filesystem.create_dir("lake")
    return filesystem


@pytest.fixture
def feast_store(tmp_path: Path) -> FeatureStore:
    asof.write_rows(ROWS, tmp_path / "values.parquet")
    return asof.feast_in(tmp_path)


def job_of(feast: FeatureStore) -> AsofRetrievalJob:
    job: RetrievalJob = asof.ask(
        feast, [asof.view_of("values.parquet")], asof.asked(("a", 5), ("b", 5), ("a", 20))
    )
    assert isinstance(job, AsofRetrievalJob)
    return job


@pytest.mark.parametrize("kind", ["us, UTC", "ns, UTC", "us", "ns", "ms, UTC"])
def test_sources_on_s3_give_what_the_same_files_give_here(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str, tmp_path: Path, kind: str
) -> None:
    with s3.open_output_stream("lake/source/values.parquet") as stream:
        pq.write_table(pa.Table.from_pandas(asof.in_times(ROWS, f"datetime64[{kind}]")), stream)
    remote = asof.view_of(
        "s3://lake/source/values.parquet", ttl=timedelta(minutes=15), s3_endpoint_override=endpoint
    )
    here = asof.view_of("values.parquet", ttl=timedelta(minutes=15))
    frame = asof.asked(("a", 5), ("a", 20), ("b", 45), ("b", 46), (None, 20))
    frame["event_timestamp"] -= timedelta(microseconds=123)  # finer than some columns
    ours, theirs = (
        asof.ask(feast_store, [view], frame.assign(n=range(5)), filter_by_created_timestamp=True)
        .to_df()
        .sort_values("n", ignore_index=True)
        for view in (remote, here)
    )
    pd.testing.assert_frame_equal(ours, theirs)
    assert ours["value"].notna().tolist() == [True, True, True, False, False]


def test_bounds_that_a_column_cannot_say_are_left_to_the_query(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str
) -> None:
    rows = asof.in_times(ROWS, "datetime64[ns, UTC]")
    with s3.open_output_stream("lake/nanoseconds.parquet") as stream:
        pq.write_table(pa.Table.from_pandas(rows), stream)
    centuries = timedelta(days=365 * 500)
    view = asof.view_of(
        "s3://lake/nanoseconds.parquet", ttl=centuries, s3_endpoint_override=endpoint
    )
    assert asof.ask(feast_store, [view], asof.asked(("a", 5))).to_df()["value"].tolist() == [1.0]


def failing(job: AsofRetrievalJob, num_batches: int) -> AsofRetrievalJob:
    """The same job, whose query breaks off after some batches were sent."""

    @contextmanager
    def read(order: Sequence[str]) -> Iterator[Rows]:
        def batches() -> Iterator[pa.RecordBatch]:
            for _ in range(num_batches):
                yield pa.RecordBatch.from_pydict({"text": [str(n) * 20 for n in range(60_000)]})
            raise FeatureStoreError("a retrieval failed: spoilt")

        yield Rows(batches())

    return replace(job, read=read)


def test_a_file_that_breaks_off_leaves_nothing(feast_store: FeatureStore, tmp_path: Path) -> None:
    target = tmp_path / "out" / "data.parquet"
    with pytest.raises(FeatureStoreError, match="spoilt"):
        failing(job_of(feast_store), 5).write_parquet(target, ["text"], 8192)
    assert not list(target.parent.iterdir())


def test_a_result_is_saved_whole_to_a_new_file_alone(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "saved.parquet"
    storage = SavedDatasetFileStorage(str(target))
    with pytest.raises(FeatureStoreError, match="3 entity rows went into a retrieval, 1 came out"):
        asof.sabotaged(job_of(feast_store), lambda batch: batch.slice(2)).persist(storage)
    assert not list(target.parent.iterdir())
    job_of(feast_store).persist(storage)
    with pytest.raises(FeatureStoreError, match="exists; allow overwriting"):
        job_of(feast_store).persist(storage)
    job_of(feast_store).persist(storage, allow_overwrite=True)
    assert len(pd.read_parquet(target)) == 3
    for place in ("relative.parquet", "s3://lake/x.parquet", str(tmp_path)):
        with pytest.raises(FeatureStoreError, match="goes to a Parquet file named by its whole"):
            job_of(feast_store).persist(SavedDatasetFileStorage(place))


def test_published_tables_are_not_appended_to(feast_store: FeatureStore) -> None:
    with pytest.raises(FeatureStoreError, match="cannot be appended to: feature tables are pub"):
        feast_store._get_provider().offline_store.offline_write_batch(
            feast_store.config, asof.view_of("values.parquet"), pa.Table.from_pandas(ROWS), None
        )
