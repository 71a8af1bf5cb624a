"""`python -m flows bless`: profile a window that is known to be clean into the generated suites."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.config import PipelineConfig, read_pipeline_config
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureSnapshot, TableRef
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.scratch import scratch_folder
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder


@dataclass(frozen=True)
class _Source:
    """A table that can be blessed: its suite and its files."""

    name: str
    suite: str
    files: Path


def add_bless_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    bless = commands.add_parser("bless", help="profile a clean window into the generated suites")
    bless.add_argument("start", help="first moment, such as 2013-01-01T05:00Z")
    bless.add_argument("end", help="first moment after the window")
    bless.add_argument("--suite", action="append", help="this suite only; may be given again")
    bless.add_argument("--reviewed", help="when and how a person reviewed the bands")


def bless_window(window: TimeWindow, options: argparse.Namespace, settings: Settings) -> list[str]:
    """Write bands for each suite of the use case from the rows of `window`.

    Raises:
        ConfigurationError: a named suite is not of this use case, or nothing was refreshed yet.
        DataContractError: a table cannot be blessed. Files written before stay.
    """
    from tasks.validation.profiling import NOT_REVIEWED, bless_table, write_blessed
    from tasks.validation.suites import read_suite

    config = read_pipeline_config(settings.feature_repo)
    sources = {source.suite: source for source in _sources(window, config, settings)}
    wanted = options.suite or list(sources)
    if unknown := sorted(set(wanted) - sources.keys()):
        raise ConfigurationError(
            f"suite(s) {', '.join(unknown)} cannot be blessed; this use case has "
            f"{', '.join(sources)}. Nothing was written"
        )
    lines = []
    with scratch_folder("falaj-bless") as scratch:
        store = ArtifactStore(scratch)
        for name in wanted:
            source = sources[name]
            suite = read_suite(settings.feature_repo, name)
            hand_written = suite.model_copy(update={"blessed": None})

            table = _cut(source, hand_written.profiling.time_column, window, store)
            reviewed = options.reviewed or NOT_REVIEWED
            blessed = bless_table(table, hand_written, window, store, reviewed)
            path = write_blessed(blessed, settings.feature_repo)
            lines.append(
                f"{name:<28}{blessed.num_periods:>4} days, {len(blessed.bands):>3} columns, "
                f"{path.name} {digest_of(path)[:12]}"
            )
    return [*lines, "Review the files, then say in `reviewed` when and how."]


def _cut(
    source: _Source, time_column: str | None, window: TimeWindow, store: ArtifactStore
) -> TableRef:
    """The rows of the window as a table of their own."""
    from tasks.validation.profiling import blessed_rows

    def build(folder: StagedFolder) -> TableRef:
        target = folder.path / f"{source.name}.parquet"
        count = blessed_rows(source.files, time_column, window, target)
        return TableRef(name=source.name, artifact=folder.artifact(target.name), num_rows=count)

    return store.build_once("blessed", source.suite, TableRef, build)


def _sources(window: TimeWindow, config: PipelineConfig, settings: Settings) -> Iterator[_Source]:
    from tasks.features.tables.build import published_path
    from tasks.features.tables.landing import land_raw_rows

    store = settings.store
    landed = land_raw_rows(window, config.features, settings.feature_repo, store)
    suites = config.row_suites
    for table in landed.tables:
        yield _Source(table.name, suites[table.name], store.path(table.artifact))
    folder = published_path(settings.features_home)
    for name, suite in config.table_suites.items():
        if (folder / name).is_dir():
            yield _Source(name, suite, folder / name)
    if snapshot := _snapshot_with(window, store):
        yield _Source("snapshot", config.features.training_set.suite, snapshot)


def _snapshot_with(window: TimeWindow, store: ArtifactStore) -> Path | None:
    """The newest kept training set that covers the window."""
    found = sorted(
        (store.root / "snapshots").glob("[!.]*/value.json"), key=lambda file: file.stat().st_mtime
    )
    for file in reversed(found):
        try:
            snapshot = FeatureSnapshot.model_validate_json(file.read_text())
        except ValueError:  # of another release
            continue
        if snapshot.window.contains(window):
            return store.path(snapshot.data)
    return None
