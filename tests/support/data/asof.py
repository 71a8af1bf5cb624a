"""Small Feast views, their sources as frames, and what a point-in-time join over them must give."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.repo_config import RepoConfig
from feast.types import Float64, String

from tasks.features.offline.job import AsofRetrievalJob, Rows
from tasks.features.offline.store import AsofDuckDBOfflineStore

START = datetime(2013, 3, 10, tzinfo=UTC)  # the United States change their clocks on this day
UTC_TIMES = "datetime64[us, UTC]"
TIMES = ("at", "created")
VALUE = "values:value"


def feast_in(folder: Path, *, coerce_tz_aware: bool = True, **offline: Any) -> FeatureStore:
    """A Feast store whose relative sources lie in `folder`."""
    store = {
        "type": "tasks.features.offline.store.AsofDuckDBOfflineStore",
        "tables_path": str(folder),
        "spill_path": str(folder / "spill"),
        **offline,
    }
    config = RepoConfig(
        project="test",
        provider="local",
        registry={"registry_type": "sql", "path": f"sqlite:///{folder / 'registry.db'}"},
        entity_key_serialization_version=3,
        online_store={"type": "sqlite", "path": str(folder / "online.db")},
        offline_store=store,
        repo_path=folder,
        coerce_tz_aware=coerce_tz_aware,
    )
    return FeatureStore(config=config)


def view_of(
    path: Path | str,
    keys: Sequence[str] = ("k0",),
    ttl: timedelta = timedelta(0),
    *,
    name: str = "values",
    mapping: dict[str, str] | None = None,
    features: Sequence[str] = ("value",),
    **source: Any,
) -> FeatureView:
    """A view of string keys and float features over one Parquet file, as after `feast apply`."""
    entities = [Entity(name=k, join_keys=[k], value_type=ValueType.STRING) for k in keys]
    view = FeatureView(
        name=name,
        entities=entities,
        ttl=ttl,
        schema=[Field(name=feature, dtype=Float64) for feature in features],
        source=FileSource(
            name=f"{name}_table",
            path=str(path),
            timestamp_field="at",
            created_timestamp_column="created",
            field_mapping=mapping or {},
            **source,
        ),
    )
    view.entity_columns = [Field(name=k, dtype=String) for k in keys]
    return view


def write_rows(rows: pd.DataFrame, path: Path, keys: Sequence[str] = ("k0",)) -> Path:
    """Write source rows with string keys and times in UTC microseconds."""
    times = {c: UTC_TIMES for c in TIMES if c in rows}
    rows.astype({**dict.fromkeys(keys, "string"), **times}).to_parquet(path, index=False)
    return path


def in_times(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows with both times in another type, without a zone where it names none."""
    times = {c: rows[c] if "UTC" in kind else rows[c].dt.tz_localize(None) for c in TIMES}
    return rows.assign(**{column: time.astype(kind) for column, time in times.items()})


def values(*rows: tuple[str | None, float, float, float]) -> pd.DataFrame:
    """Source rows of one key: key, minute of the event, minute of the creation, value."""
    frame = pd.DataFrame(rows, columns=["k0", "at", "created", "value"])
    for column in TIMES:
        frame[column] = START + pd.to_timedelta(frame[column], unit="min")
    return frame


def asked(*rows: tuple[str | None, float]) -> pd.DataFrame:
    """Entity rows of one key: key, minute."""
    frame = pd.DataFrame(rows, columns=["k0", "event_timestamp"])
    minutes = pd.to_timedelta(frame["event_timestamp"], unit="min")
    return frame.assign(event_timestamp=(START + minutes).astype(UTC_TIMES)).astype(
        {"k0": "string"}
    )


def ask(
    feast: FeatureStore,
    views: Sequence[FeatureView],
    entities: pd.DataFrame | str | None,
    refs: Sequence[str] = (VALUE,),
    kind: type[DuckDBOfflineStore] = AsofDuckDBOfflineStore,
    **options: Any,
) -> RetrievalJob:
    """The job of one store for views that need no registry."""
    given = entities.copy() if isinstance(entities, pd.DataFrame) else entities
    return kind.get_historical_features(
        feast.config, list(views), list(refs), given, feast.registry, "test", **options
    )


def found(job: RetrievalJob, column: str = "value") -> list[float | None]:
    """The values of a result, in the order of its moments."""
    return listed(job.to_df().sort_values("event_timestamp")[column])


def listed(column: pd.Series) -> list[float | None]:
    """A column of numbers, None for null."""
    return [None if pd.isna(v) else float(v) for v in column]


def newest_known(
    entity: Mapping[str, Any],
    rows: pd.DataFrame,
    keys: Mapping[str, str],
    ttl: timedelta,
    cut_off: bool,
) -> float | None:
    """The value that one entity row must get, found by looking at every source row.

    Args:
        keys: column of the source to column of the entity row.
    """
    moment = entity["event_timestamp"]
    known = [
        (row["at"], row["created"], number, row["value"])
        for number, row in enumerate(rows.to_dict("records"))
        if all(entity[e] is not None and entity[e] == row[k] for k, e in keys.items())
        and row["at"] <= moment
        and (not cut_off or row["created"] <= moment)
    ]
    best = max(known, default=None)
    if best is None or (ttl and best[0] < moment - ttl):
        return None
    return float(best[3])


def sabotaged(
    job: RetrievalJob, harm: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> AsofRetrievalJob:
    """The same job, each of whose batches is changed before it is looked at."""
    assert isinstance(job, AsofRetrievalJob)
    honest = job.read

    @contextmanager
    def read(order: Sequence[str]) -> Iterator[Rows]:
        with honest(order) as rows:
            yield replace(rows, batches=map(harm, rows.batches))

    return replace(job, read=read)
