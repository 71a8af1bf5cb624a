"""What the ASOF offline store writes: Parquet files on the disk or on S3, whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from feast.errors import SavedDatasetLocationAlreadyExists
from feast.feature_view import FeatureView
from feast.infra.offline_stores.file_source import FileSource, SavedDatasetFileStorage
from feast.repo_config import RepoConfig
from pyarrow import NativeFile
from pyarrow.fs import FileSystem, FileType

from tasks.features.access.guarded_store import file_lock
from tasks.features.offline.source import local_path
from tasks.features.online.write_rules import check_pushed
from tasks.kernel.errors import FeatureStoreError, StorageError
from tasks.kernel.files import replacing

logger = logging.getLogger(__name__)

DATA_FILE = "data.parquet"
"""Name of the file where a saved dataset is a folder."""


class SavedDatasetTakenError(FeatureStoreError, SavedDatasetLocationAlreadyExists):
    """The place of a saved dataset is taken; callers of Feast know it by Feast's own error too."""

    def __init__(self, place: str) -> None:
        Exception.__init__(
            self,
            f"saved dataset {place} exists; allow overwriting or choose another place. Nothing was "
            "written",
        )


@dataclass(frozen=True)
class LocalTarget:
    """A file on the disk."""

    path: Path

    def check_free(self, allow_overwrite: bool) -> None:
        """Refuse a place that is taken.

        Raises:
            SavedDatasetTakenError: a file is there and may not be replaced.
            FeatureStoreError: the folder holds other files.
        """
        others = [f for f in self.path.parent.glob("*.parquet") if f != self.path]
        if self.path.name == DATA_FILE and others:
            raise FeatureStoreError(
                f"saved dataset {self.path.parent} holds {others[0].name}, which is not of it; "
                "choose an empty folder. Nothing was written"
            )
        if self.path.exists() and not allow_overwrite:
            raise SavedDatasetTakenError(str(self.path))

    def aside(self) -> AbstractContextManager[Path]:
        """A file to write; it takes its place when the block ends, and is gone when it fails."""
        return replacing(self.path)


@dataclass(frozen=True)
class RemoteTarget:
    """An object on S3.

    An upload becomes an object when it ends, even where it ends in an error; so it goes to a key of
    its own, and is copied to its place by the server when it is complete (at most 5 GB).
    """

    filesystem: FileSystem
    path: str

    def check_free(self, allow_overwrite: bool) -> None:
        """Refuse a place that is taken.

        Raises:
            SavedDatasetTakenError: an object is there and may not be replaced.
            StorageError: the store cannot be reached.
        """
        with _store_errors_explained(self.path):
            taken = self.filesystem.get_file_info(self.path).type != FileType.NotFound
        if taken and not allow_overwrite:
            raise SavedDatasetTakenError(f"s3://{self.path}")

    @contextmanager
    def aside(self) -> Iterator[NativeFile]:
        """A file to write; the object appears when the block ends.

        Raises:
            StorageError: the store refused; nothing of this upload is left.
        """
        folder, _, name = self.path.rpartition("/")
        aside = f"{folder}/.{name}.{uuid4().hex}.part"
        with _store_errors_explained(self.path):
            try:
                with self.filesystem.open_output_stream(aside) as stream:
                    yield stream
                self.filesystem.copy_file(aside, self.path)
            finally:
                self._remove(aside)

    def _remove(self, key: str) -> None:
        try:
            if self.filesystem.get_file_info(key).type != FileType.NotFound:
                self.filesystem.delete_file(key)
        except OSError as exc:  # never hides what went wrong before
            logger.warning("s3://%s could not be removed: %s", key, exc)


def target_of(storage: SavedDatasetFileStorage, config: RepoConfig) -> LocalTarget | RemoteTarget:
    """The file of a saved dataset: what its path names, or one file inside where it is a folder.

    Raises:
        FeatureStoreError: the path is relative to a folder of published tables, or no place that
            this store writes.
    """
    options = storage.file_options
    uri = options.uri if options.uri.endswith(".parquet") else f"{options.uri}/{DATA_FILE}"
    if uri.startswith("s3://"):
        filesystem, path = FileSource.create_filesystem_and_path(uri, options.s3_endpoint_override)
        return RemoteTarget(filesystem, path.replace("//", "/"))
    path = local_path(uri, config)
    if config.offline_store.tables_path and not Path(options.uri).is_absolute():
        raise FeatureStoreError(
            f"saved dataset {options.uri} would lie among the feature tables; give an absolute "
            "path or s3://. Nothing was written"
        )
    return LocalTarget(path)


@contextmanager
def _store_errors_explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"s3://{path}: the object store refused ({exc}); expected a bucket that exists, and "
            "credentials in the environment that may write it. Nothing half written is visible"
        ) from exc


def append_rows(view: FeatureView, path: Path, rows: pa.Table) -> None:
    """Append to a Parquet file, one writer after the other, or a part to a folder of them.

    Raises:
        WindowError: a time is missing, has no time zone or lies in the future.
        FeatureStoreError: the rows have other columns than the file.
        TransientError: another writer holds the file for too long.
        StorageError: the disk refused the write.
    """
    check_pushed(view, rows)
    with file_lock(path.with_name(f"{path.name}.lock")):
        parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        typed = _as_stored(view, rows, pq.read_schema(parts[0]) if parts else rows.schema)
        if path.is_dir():
            _put(typed, path / f"{uuid4().hex}.parquet")
        else:
            _put(pa.concat_tables([pq.read_table(path), typed]), path)


def _as_stored(view: FeatureView, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        return rows.cast(schema)
    except (ValueError, pa.ArrowInvalid) as exc:
        raise FeatureStoreError(
            f"rows pushed to feature view {view.name} have the columns {rows.schema.names}, its "
            f"table has {schema.names}, in this order ({exc}). Nothing was written"
        ) from exc


def _put(rows: pa.Table, file: Path) -> None:
    """Write aside, then rename."""
    with replacing(file) as aside:
        pq.write_table(rows, aside)
