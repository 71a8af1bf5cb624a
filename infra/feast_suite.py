"""Lets Feast's own tests of offline stores run against the ASOF store.

They are not part of Feast's package. With a checkout of feast-dev/feast and their few libraries
(assertpy, pytest-asyncio, pytest-mock, minio, testcontainers) installed, in `sdk/python` of it:

    FULL_REPO_CONFIGS=infra.feast_suite IS_TEST=True PYTHONPATH=.:<this project> \
        python -m pytest --integration -m universal_offline_stores tests/integration/offline_store
"""

from __future__ import annotations

import importlib

from tasks.features.offline.store import AsofDuckDBOfflineStoreConfig

_files = importlib.import_module("tests.universal.feature_repos.universal.data_sources.file")


class AsofDataSourceCreator(_files.FileDataSourceCreator):  # type: ignore[name-defined]
    """Parquet files read by the ASOF store."""

    def create_offline_store_config(self) -> AsofDuckDBOfflineStoreConfig:
        """Settings of the store under test."""
        return AsofDuckDBOfflineStoreConfig(memory_limit_mb=1000)


AVAILABLE_OFFLINE_STORES = [("local", AsofDataSourceCreator)]
AVAILABLE_ONLINE_STORES = {"sqlite": ({"type": "sqlite"}, None)}
