"""Feast provider that writes an audit line for every apply, materialize, push and historical read.

A plug-in by Feast's own extension point: name it as `provider`. Feast's SDK and its feature server
both act through the provider, so both are audited alike.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from feast.entity import Entity
from feast.feature_view import FeatureView
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.infra.passthrough_provider import PassthroughProvider
from feast.infra.registry.base_registry import BaseRegistry
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.permissions.security_manager import get_security_manager
from feast.repo_config import RepoConfig
from feast.saved_dataset import SavedDataset

from tasks.contracts.base import TimeWindow
from tasks.features.online.newer_wins import check_pushed
from tasks.governance.journal import Journal, flow_run_id, process_identity
from tasks.kernel.errors import WindowError


class AuditedProvider(PassthroughProvider):
    """Everything goes on to the stores of the configuration, and leaves a line."""

    def __init__(self, config: RepoConfig) -> None:
        super().__init__(config)
        self.trail = audit_trail(config)

    def update_infra(
        self,
        project: str,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Bring the stores into line with the definitions: the work of an apply."""
        subject = {
            "views": sorted(view.name for view in tables_to_keep),
            "removed": sorted(view.name for view in tables_to_delete),
        }
        with self.recorded("apply", subject):
            super().update_infra(project, tables_to_delete, tables_to_keep, *arguments, **options)

    def teardown_infra(
        self, project: str, tables: Sequence[FeatureView], entities: Sequence[Entity]
    ) -> None:
        """Remove the project from the stores."""
        with self.recorded("teardown", {"views": sorted(view.name for view in tables)}):
            super().teardown_infra(project, tables, entities)

    def materialize_single_feature_view(
        self,
        config: RepoConfig,
        feature_view: FeatureView | OnDemandFeatureView,
        start_date: datetime,
        end_date: datetime,
        registry: BaseRegistry,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Write a view's newest values online.

        Raises:
            WindowError: the end lies in the future or not after the start.
        """
        window = {"start": start_date.isoformat(), "end": end_date.isoformat()}
        facts = {"window": window, "registry_version": registry_version(registry)}
        with self.recorded("materialize", {"views": [feature_view.name]}, **facts):
            _check_window(start_date, end_date)
            super().materialize_single_feature_view(
                config, feature_view, start_date, end_date, registry, *arguments, **options
            )

    def ingest_df(
        self, feature_view: FeatureView, df: pd.DataFrame, *arguments: Any, **options: Any
    ) -> None:
        """Push rows online.

        Raises:
            WindowError: a row's time is missing, has no time zone or lies in the future.
        """
        with self._pushed(feature_view, "online", df):
            super().ingest_df(feature_view, df, *arguments, **options)

    async def ingest_df_async(
        self, feature_view: FeatureView, df: pd.DataFrame, *arguments: Any, **options: Any
    ) -> None:
        """Push rows online, without blocking.

        Raises:
            WindowError: a row's time is missing, has no time zone or lies in the future.
        """
        with self._pushed(feature_view, "online", df):
            await super().ingest_df_async(feature_view, df, *arguments, **options)

    def ingest_df_to_offline_store(self, feature_view: FeatureView, table: pa.Table) -> None:
        """Push rows offline.

        Raises:
            WindowError: a row's time is missing, has no time zone or lies in the future.
        """
        with self._pushed(feature_view, "offline", table):
            super().ingest_df_to_offline_store(feature_view, table)

    def get_historical_features(
        self,
        config: RepoConfig,
        feature_views: list[FeatureView],
        feature_refs: list[str],
        entity_df: pd.DataFrame | str | None,
        registry: BaseRegistry,
        *arguments: Any,
        **options: Any,
    ) -> RetrievalJob:
        """Prepare a point-in-time read; each time it is executed, it leaves a line."""
        job = super().get_historical_features(
            config, feature_views, feature_refs, entity_df, registry, *arguments, **options
        )
        subject = {"views": sorted({view.name for view in feature_views})}
        facts = {**described_frame(entity_df), "registry_version": registry_version(registry)}
        return _audited(job, self.trail, audit_facts(config, subject, **facts))

    def retrieve_saved_dataset(self, config: RepoConfig, dataset: SavedDataset) -> RetrievalJob:
        """Prepare the read of a saved dataset, audited like any other historical read."""
        job = super().retrieve_saved_dataset(config, dataset)
        return _audited(job, self.trail, audit_facts(config, {"saved_dataset": dataset.name}))

    @contextmanager
    def _pushed(self, view: FeatureView, to: str, rows: pd.DataFrame | pa.Table) -> Iterator[None]:
        with self.recorded("push", {"views": [view.name]}, to=to, rows=len(rows)):
            check_pushed(view, rows)
            yield

    def recorded(
        self, action: str, subject: dict[str, Any], **facts: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        """A line for the beginning of a write, which may be killed, and one for its end."""
        described = audit_facts(self.repo_config, subject, **facts)
        self.trail.append(action, outcome="begun", **described)
        return self.trail.recorded(action, **described)


def _audited(job: RetrievalJob, trail: Journal, facts: dict[str, Any]) -> RetrievalJob:
    """The job, each of whose ways out leaves a line with the rows that came, where it says so."""
    plain = copy.copy(job)  # its ways out call each other, which is one read

    def recorded(name: str) -> Callable[..., Any]:
        def read(*arguments: Any, **options: Any) -> Any:
            with trail.recorded("historical-read", **facts) as recorded_facts:
                result = getattr(plain, name)(*arguments, **options)
                if isinstance(result, pa.Table | pd.DataFrame):
                    recorded_facts["rows"] = len(result)
                return result

        return read

    for name in ("_to_df_internal", "_to_arrow_internal", "write_parquet", "persist"):
        if hasattr(job, name):
            setattr(job, name, recorded(name))

    @contextmanager
    def open_batches(*arguments: Any, **options: Any) -> Iterator[pa.RecordBatchReader]:
        with trail.recorded("historical-read", **facts):
            with plain.open_batches(*arguments, **options) as reader:
                yield reader

    if hasattr(job, "open_batches"):
        job.open_batches = open_batches
    return job


def audit_trail(config: RepoConfig) -> Journal:
    """The trail that the profile's section `audit` names."""
    return Journal(Path(config.audit["path"]))


def audit_facts(config: RepoConfig, subject: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """What every line says: project, subject, who, and the flow run if there is one."""
    return {
        "project": config.project,
        "subject": subject,
        "who": caller(),
        "flow_run": flow_run_id(),
        **facts,
    }


def caller() -> dict[str, Any]:
    """The token's subject and roles inside a server, the process's owner elsewhere."""
    manager = get_security_manager()
    user = manager.current_user if manager else None
    if user is None:
        return process_identity()
    return {"subject": user.username, "roles": list(user.roles or [])}


def registry_version(registry: BaseRegistry) -> str | None:
    """Moment of the newest change that this process has seen in the registry."""
    seen = getattr(registry, "cached_registry_proto", None)
    if seen is None or not seen.HasField("last_updated"):
        return None
    return str(seen.last_updated.ToDatetime(UTC).isoformat())


def described_frame(entities: pd.DataFrame | str | None) -> dict[str, Any]:
    """How many rows a frame asks for; of SQL, which may hold values, its digest."""
    if isinstance(entities, str):
        return {"query_sha256": hashlib.sha256(entities.encode()).hexdigest()}
    return {"entity_rows": 0 if entities is None else len(entities)}


def _check_window(start: datetime, end: datetime) -> None:
    try:
        window = TimeWindow(start=start, end=end)
    except ValueError as exc:
        raise WindowError(
            f"materialization from {start} to {end} is reversed, empty or without a time zone; "
            "nothing was written"
        ) from exc
    window.check_not_in_future(datetime.now(UTC))
