"""What was already done with the feature store, told without opening it.

Importing Feast takes seconds; a run that finds everything in place never needs it.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tasks.contracts import FeatureTables, MaterializedView, TimeWindow
from tasks.features.config import FeatureConfig
from tasks.features.presence import online_store_is_there
from tasks.features.profile import profile_file
from tasks.features.store_mark import read_mark
from tasks.features.tables import read_query
from tasks.settings import code_digest, content_key, digest_of, write_atomically

SNAPSHOTS = "snapshots"
VIEWS = TypeAdapter(list[MaterializedView])


def definitions_digest(repo: Path) -> str:
    """Digest of what decides the feature definitions: all Python files and the store's settings."""
    files = [*sorted(repo.glob("*.py")), profile_file(repo)]
    return content_key([[file.name, digest_of(file)] for file in files])


def training_set_key(
    tables: FeatureTables, window: TimeWindow, config: FeatureConfig, repo: Path
) -> str:
    """Digest of everything that decides a training set."""
    spec = config.training_set
    queries = [spec.sql, *(query.sql for query in config.staging)]
    return content_key(
        code_digest(__file__),
        definitions_digest(repo),
        tables.version,
        window,
        spec,
        [read_query(repo, name) for name in queries],
    )


def read_ledger(home: Path) -> dict[str, Any]:
    """Which tables and definitions were materialized, and each view's watermark."""
    return read_json(home / "feast" / "materialized.json")


def write_ledger(
    tables: FeatureTables, repo: Path, views: tuple[MaterializedView, ...], home: Path, mark: int
) -> None:
    """Record a finished materialization of a store that bears `mark`.

    Of two that end at the same time with the same tables, the later watermark stays.
    """
    record: dict[str, Any] = {
        "version": tables.version,
        "definitions": definitions_digest(repo),
        "mark": mark,
    }
    file = home / "feast" / "materialized.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_ledger(home)
        if all(known.get(name) == value for name, value in record.items()):
            ahead = {v.name: v.watermark for v in VIEWS.validate_python(known["views"])}
            views = tuple(
                view.model_copy(
                    update={"watermark": max(view.watermark, ahead.get(view.name, view.watermark))}
                )
                for view in views
            )
        record["views"] = VIEWS.dump_python(list(views), mode="json")
        write_atomically(file, json.dumps(record, indent=1))


def is_filled(ledger: dict[str, Any], home: Path, repo: Path) -> bool:
    """True where the online store is the one that the ledger speaks of, and was not emptied.

    Raises:
        TransientError: Redis does not answer.
    """
    mark = ledger.get("mark")
    return mark is not None and online_store_is_there(home, repo) and read_mark(home, repo) == mark


def online_views(
    tables: FeatureTables, window: TimeWindow, home: Path, repo: Path
) -> tuple[MaterializedView, ...] | None:
    """The views, where these tables are online up to the window's end; None where they are not."""
    ledger = read_ledger(home)
    views = VIEWS.validate_python(ledger.get("views", []))
    is_online = (
        bool(views)
        and ledger["version"] == tables.version
        and ledger["definitions"] == definitions_digest(repo)
        and all(view.watermark >= window.end for view in views)
        and is_filled(ledger, home, repo)
    )
    return tuple(views) if is_online else None


def read_json(path: Path) -> dict[str, Any]:
    """Content of a small JSON file; empty where it is absent or was cut off."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}
