"""The Feast store of one installation: open it, load and apply its definitions."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import yaml
from feast import Entity, FeatureService, FeatureStore, FeatureView
from feast.data_source import DataSource
from feast.errors import FeatureServiceNotFoundException
from feast.repo_config import RepoConfig

from tasks.errors import ConfigurationError, refused_writes_explained
from tasks.features.ledger import definitions_digest, read_json
from tasks.settings import write_atomically

logger = logging.getLogger(__name__)

LOSSY_STORES = {"dask", "file", None}


def open_store(home: Path, repo: Path, tables_path: Path | None = None) -> FeatureStore:
    """Open the feature store that `feature_store.yaml` describes.

    Args:
        home: state folder, `${FALAJ_HOME}` in the file.
        repo: feature repository.
        tables_path: read feature tables here, pinning one version; None for the published one.

    Raises:
        ConfigurationError: the file is missing or wrong, or names a store that loses rows.
    """
    file = repo / "feature_store.yaml"
    try:
        text = string.Template(file.read_text()).safe_substitute(
            {**os.environ, "FALAJ_HOME": str(home)}
        )
        described = yaml.safe_load(text)
        offline = described.get("offline_store") or {}
    except (OSError, yaml.YAMLError, AttributeError) as exc:
        raise ConfigurationError(
            f"{file.name} cannot be read ({exc}); expected Feast's YAML"
        ) from exc
    if offline.get("type") in LOSSY_STORES:
        raise ConfigurationError(
            f"{file.name} names offline store {offline.get('type') or 'dask (the default)'}, which "
            "drops entity rows without a word; use "
            "tasks.features.asof_store.AsofDuckDBOfflineStore"
        )
    if tables_path:
        offline["tables_path"] = str(tables_path)
    with refused_writes_explained(home / "feast"):
        (home / "feast").mkdir(parents=True, exist_ok=True)
    return FeatureStore(config=RepoConfig(**described, repo_path=repo))


def apply_definitions(store: FeatureStore, home: Path, repo: Path, *, again: bool = False) -> None:
    """Make the registry say what the repository says, and the online store have its tables.

    Nothing is done where the same definitions were applied before, unless asked to do it `again`.
    """
    mark = home / "feast" / "applied.json"
    digest = definitions_digest(repo)
    if read_json(mark).get("definitions") == digest and store.list_feature_views() and not again:
        return
    objects = load_definitions(repo)
    kept = {(type(o).__name__, o.name) for o in objects}
    registered = [
        *store.list_feature_services(),
        *store.list_feature_views(),
        *store.list_data_sources(),
        *store.list_entities(),
    ]
    stale = [
        o
        for o in registered
        if (type(o).__name__, o.name) not in kept and not o.name.startswith("__")
    ]
    with quiet():
        store.apply(objects, objects_to_delete=stale, partial=False)
    write_atomically(mark, json.dumps({"definitions": digest}))
    logger.info("applied %d feature definitions", len(objects))


def load_definitions(repo: Path) -> list[Entity | DataSource | FeatureView | FeatureService]:
    """Feast objects of every module at the top of the repository, each once.

    Modules are imported by their bare names, as Feast does it, and forgotten afterwards, so that
    another repository may have modules of the same names.
    """
    kinds = (Entity, DataSource, FeatureView, FeatureService)
    found: dict[int, Entity | DataSource | FeatureView | FeatureService] = {}
    bare_names = [file.stem for file in sorted(repo.glob("*.py"))]
    sys.path.insert(0, str(repo))
    try:
        importlib.invalidate_caches()
        for name in bare_names:
            sys.modules.pop(name, None)
        for name in bare_names:
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, kinds):
                    found[id(value)] = value
    finally:
        sys.path.remove(str(repo))
        for name in bare_names:
            sys.modules.pop(name, None)
    return list(found.values())


def find_service(store: FeatureStore, name: str) -> FeatureService:
    """A feature service by name.

    Raises:
        ConfigurationError: there is none; the sentence lists those there are.
    """
    try:
        return store.get_feature_service(name)
    except FeatureServiceNotFoundException as exc:
        known = ", ".join(sorted(s.name for s in store.list_feature_services())) or "none"
        raise ConfigurationError(
            f"feature service {name!r} does not exist in project {store.project}; there are: "
            f"{known}. Name one of these or define it in the feature repository. Nothing was read"
        ) from exc


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Feast's progress text off standard output; it goes to the debug log."""
    said = io.StringIO()
    with redirect_stdout(said):
        yield
    logger.debug("feast: %s", said.getvalue())
