"""Saved datasets and sources on the disk and on S3: whole or not at all, never over another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feast import Entity, FeatureStore, FileSource, ValueType
from feast.data_format import DeltaFormat
from feast.errors import SavedDatasetLocationAlreadyExists
from feast.infra.offline_stores.file_source import SavedDatasetFileStorage
from feast.infra.offline_stores.offline_store import RetrievalJob
from pyarrow.fs import FileSelector, FileSystem, S3FileSystem

from tasks.features.offline.job import AsofRetrievalJob, Rows
from tasks.kernel.errors import FeatureStoreError, StorageError
from tests.support.data.asof import (
    START,
    VALUE,
    ask,
    asked,
    feast_in,
    sabotaged,
    values,
    view_of,
    write_rows,
)
from tests.support.services.servers import s3_server

ROWS = values(("a", 0, 0, 1.0), ("a", 10, 10, 2.0), ("b", 30, 30, 3.0))


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
    write_rows(ROWS, tmp_path / "values.parquet")
    return feast_in(tmp_path)


def job_of(feast: FeatureStore) -> AsofRetrievalJob:
    job: RetrievalJob = ask(
        feast, [view_of("values.parquet")], asked(("a", 5), ("b", 5), ("a", 20))
    )
    assert isinstance(job, AsofRetrievalJob)
    return job


def keys(s3: FileSystem, folder: str) -> list[str]:
    found = s3.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True))
    return sorted(info.path for info in found)


def test_a_result_streams_to_an_object_and_back_as_a_source(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str
) -> None:
    place = SavedDatasetFileStorage("s3://lake/back/saved", s3_endpoint_override=endpoint)
    job_of(feast_store).persist(place)
    assert keys(s3, "lake/back") == ["lake/back/saved", "lake/back/saved/data.parquet"]
    source = FileSource(
        path="s3://lake/back/saved",
        timestamp_field="event_timestamp",
        s3_endpoint_override=endpoint,
    )
    pulled = feast_store._get_provider().offline_store.pull_all_from_table_or_query(
        feast_store.config, source, ["k0"], ["value"], "event_timestamp"
    )
    result = pulled.to_df().sort_values("event_timestamp")
    assert sorted(result["value"].dropna()) == [1.0, 2.0]
    assert len(result) == 3


@pytest.mark.parametrize("kind", ["datetime64[us, UTC]", "datetime64[ns]", "datetime64[ms, UTC]"])
def test_sources_on_s3_give_what_the_same_files_give_here(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str, tmp_path: Path, kind: str
) -> None:
    naive = "UTC" not in kind
    frame = ROWS.copy()
    for column in ("at", "created"):
        times = frame[column].dt.tz_localize(None) if naive else frame[column]
        frame[column] = times.astype(kind)
    with s3.open_output_stream("lake/source/values.parquet") as stream:
        pq.write_table(pa.Table.from_pandas(frame), stream)
    remote = view_of(
        "s3://lake/source/values.parquet", ttl=timedelta(minutes=15), s3_endpoint_override=endpoint
    )
    here = view_of("values.parquet", ttl=timedelta(minutes=15))
    frame = asked(("a", 5), ("a", 20), ("b", 45), ("b", 46), (None, 20))
    frame["event_timestamp"] -= timedelta(microseconds=123)  # finer than some columns
    ours, theirs = (
        ask(feast_store, [view], frame.assign(n=range(5)), filter_by_created_timestamp=True)
        .to_df()
        .sort_values("n", ignore_index=True)
        for view in (remote, here)
    )
    pd.testing.assert_frame_equal(ours, theirs)
    assert ours["value"].notna().tolist() == [True, True, True, False, False]
    day = {"start_date": START, "end_date": START + timedelta(minutes=10)}
    assert len(ask(feast_store, [remote], None, **day).to_df()) == 2


def test_bounds_that_a_column_cannot_say_are_left_to_the_query(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str
) -> None:
    kinds = {"at": "datetime64[ns, UTC]", "created": "datetime64[ns, UTC]"}
    with s3.open_output_stream("lake/nanoseconds.parquet") as stream:
        pq.write_table(pa.Table.from_pandas(ROWS.astype(kinds)), stream)
    centuries = timedelta(days=365 * 500)
    view = view_of("s3://lake/nanoseconds.parquet", ttl=centuries, s3_endpoint_override=endpoint)
    assert ask(feast_store, [view], asked(("a", 5))).to_df()["value"].tolist() == [1.0]


def test_an_object_that_exists_is_only_replaced_when_allowed(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str
) -> None:
    place = SavedDatasetFileStorage("s3://lake/once.parquet", s3_endpoint_override=endpoint)
    job_of(feast_store).persist(place)
    before = s3.get_file_info("lake/once.parquet").mtime
    with pytest.raises(FeatureStoreError, match=r"s3://lake/once\.parquet exists; allow") as said:
        job_of(feast_store).persist(place)
    assert isinstance(said.value, SavedDatasetLocationAlreadyExists)  # as Feast's stores raise it
    assert s3.get_file_info("lake/once.parquet").mtime == before
    job_of(feast_store).persist(place, allow_overwrite=True)
    assert pq.read_table("lake/once.parquet", filesystem=s3).num_rows == 3


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


def test_an_upload_that_breaks_off_leaves_nothing_and_spares_what_was_there(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str
) -> None:
    place = SavedDatasetFileStorage("s3://lake/half/kept.parquet", s3_endpoint_override=endpoint)
    job_of(feast_store).persist(place)
    before = keys(s3, "lake/half")
    for num_batches in (0, 1, 5):
        with pytest.raises(FeatureStoreError, match="a retrieval failed: spoilt"):
            failing(job_of(feast_store), num_batches).persist(place, allow_overwrite=True)
    assert keys(s3, "lake/half") == before
    assert pq.read_table("lake/half/kept.parquet", filesystem=s3).num_rows == 3


@pytest.mark.parametrize("place", ["saved.parquet", "s3://lake/lost/saved.parquet"])
def test_a_result_that_lost_rows_is_not_saved(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str, tmp_path: Path, place: str
) -> None:
    where = place if place.startswith("s3") else str(tmp_path / place)
    storage = SavedDatasetFileStorage(where, s3_endpoint_override=endpoint)
    with pytest.raises(FeatureStoreError, match="3 entity rows went into a retrieval, 1 came out"):
        sabotaged(job_of(feast_store), lambda batch: batch.slice(2)).persist(storage)
    assert keys(s3, "lake/lost") == []
    assert not list(tmp_path.glob("*saved*"))


def test_a_store_that_refuses_is_explained(
    feast_store: FeatureStore, s3: FileSystem, endpoint: str
) -> None:
    storage = SavedDatasetFileStorage("s3://nowhere/x.parquet", s3_endpoint_override=endpoint)
    with pytest.raises(StorageError, match=r"s3://nowhere/x\.parquet: the object store refused"):
        job_of(feast_store).persist(storage)
    view = view_of("s3://nowhere/x.parquet", s3_endpoint_override=endpoint)
    with pytest.raises(FeatureStoreError, match="source values_table at s3://nowhere/x"):
        ask(feast_store, [view], asked(("a", 1))).to_df()


def test_a_saved_dataset_is_a_file_or_a_folder_with_one(
    feast_store: FeatureStore, tmp_path: Path
) -> None:
    for name in ("file.parquet", "folder"):
        storage = SavedDatasetFileStorage(str(tmp_path / "out" / name))
        job_of(feast_store).persist(storage)
        with pytest.raises(FeatureStoreError, match=f"{name}.* exists; allow overwriting"):
            job_of(feast_store).persist(storage)
        job_of(feast_store).persist(storage, allow_overwrite=True)
        assert len(pd.read_parquet(tmp_path / "out" / name)) == 3
    assert {f.name for f in (tmp_path / "out").rglob("*")} == {
        "file.parquet",
        "folder",
        "data.parquet",
    }
    (tmp_path / "out" / "folder" / "data.parquet").rename(tmp_path / "out" / "folder" / "x.parquet")
    with pytest.raises(FeatureStoreError, match=r"holds x\.parquet, which is not of it"):
        job_of(feast_store).persist(storage, allow_overwrite=True)


def test_a_file_that_breaks_off_leaves_nothing(feast_store: FeatureStore, tmp_path: Path) -> None:
    target = tmp_path / "out" / "data.parquet"
    with pytest.raises(FeatureStoreError, match="spoilt"):
        failing(job_of(feast_store), 5).write_parquet(target, ["text"], 8192)
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize(
    ("storage", "sentence"),
    [
        (SavedDatasetFileStorage("relative"), "would lie among the feature tables"),
        (SavedDatasetFileStorage("gs://bucket/x"), "no place that this store reads or writes"),
        (SavedDatasetFileStorage("x", DeltaFormat()), "goes to a Parquet file, not to"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_with_a_sentence(
    feast_store: FeatureStore, storage: Any, sentence: str
) -> None:
    with pytest.raises(FeatureStoreError, match=sentence):
        job_of(feast_store).persist(storage)


@pytest.mark.filterwarnings(
    "ignore:(Saving dataset|Retrieving datasets) is an experimental:RuntimeWarning"
)
def test_feast_saves_a_dataset_and_finds_it_again(tmp_path: Path) -> None:
    feast = feast_in(tmp_path)
    write_rows(ROWS, tmp_path / "values.parquet")
    feast.apply([Entity(name="k0", value_type=ValueType.STRING), view_of("values.parquet")])
    job = feast.get_historical_features(
        "SELECT 'a' AS k0, TIMESTAMPTZ '2013-03-10 00:05:00+00' AS event_timestamp", [VALUE]
    )
    storage = SavedDatasetFileStorage(str(tmp_path / "saved"))
    saved = feast.create_saved_dataset(job, "first", storage)
    assert saved.join_keys == ["k0"]
    assert feast.get_saved_dataset("first").to_df()["value"].tolist() == [1.0]


@pytest.mark.parametrize("path", ["values.parquet", "s3://lake/values.parquet"])
def test_published_tables_are_not_appended_to(tmp_path: Path, path: str) -> None:
    feast = feast_in(tmp_path)
    view = view_of(path)
    with pytest.raises(FeatureStoreError, match="cannot be appended to: feature tables are pub"):
        feast._get_provider().offline_store.offline_write_batch(
            feast.config, view, pa.Table.from_pandas(ROWS), None
        )
