"""Commands of data: approve a baseline, data docs, where something comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.context import End, Here, Start, time_window
from falaj.loop import row
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of, scratch_folder
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder

if TYPE_CHECKING:
    from flows.config import PipelineConfig, Suites
    from tasks.contracts.base import TimeWindow
    from tasks.contracts.data import TableRef
    from tasks.validation.suites import Suite


def docs(*, context: Here) -> list[str]:
    """Bring the data docs of all validations up to date."""
    from tasks.validation.docs import build_site

    site = build_site(context.settings.store, context.home)
    return [row("Data docs", f"{site.index} with {site.num_pages} results")]


def trace(thing: str, /, *, context: Here) -> list[str]:
    """Show what something was made from, to the raw files.

    Args:
        thing: Beginning of a digest, or a name such as models/<name>/1.
    """
    from tasks.lineage.journal import Journal
    from tasks.lineage.trace import format_chain
    from tasks.lineage.trace import trace as trace_back

    chain = trace_back(thing, Journal(context.home / "lineage"))
    return [
        *format_chain(chain),
        "",
        *(row("From", f"{d.name} {d.version}") for d in chain.sources()),
    ]


@dataclass(frozen=True)
class _Source:
    """A table that can be a baseline: its suite and its files."""

    name: str
    suite: Suite
    files: Path


def approve_baseline(
    start: Start,
    end: End,
    /,
    *,
    suite: list[str] | None = None,
    reviewed: str | None = None,
    context: Here,
) -> list[str]:
    """Profile a clean window into the baselines of the use case's suites.

    Args:
        start: First moment of the window, such as 2013-01-01T05:00Z.
        end: First moment after the window.
        suite: This suite only; may be repeated.
        reviewed: When and how a person reviewed the bands.

    Raises:
        ConfigurationError: a named suite is not of this use case, or nothing was refreshed yet.
        DataContractError: a table can be no baseline. Files written before stay.
    """
    from flows.config import read_pipeline_config, suites_of
    from tasks.validation.profiling import NOT_REVIEWED, profile_table, write_baseline

    window, settings = time_window(start, end), context.settings
    config = read_pipeline_config(settings.feature_repo)
    suites = suites_of(config, settings.feature_repo)
    sources = {s.suite.suite: s for s in _sources(window, config, suites, settings)}
    wanted = suite or list(sources)
    if unknown := sorted(set(wanted) - sources.keys()):
        raise ConfigurationError(
            f"suite(s) {', '.join(unknown)} can have no baseline; this use case has "
            f"{', '.join(sources)}. Nothing was written"
        )
    lines = []
    with scratch_folder("falaj-baseline") as scratch:
        store = ArtifactStore(scratch)
        for name in wanted:
            hand_written = sources[name].suite.model_copy(update={"baseline": None})
            table = _cut(sources[name], hand_written.profiling.time_column, window, store)
            baseline = profile_table(table, hand_written, window, store, reviewed or NOT_REVIEWED)
            path = write_baseline(baseline, settings.feature_repo, sources[name].suite)
            lines.append(
                f"{name:<28}{baseline.num_periods:>4} days, {len(baseline.bands):>3} columns, "
                f"{path.name} {digest_of(path)[:12]}"
            )
    return [*lines, "Review the files, then note in `reviewed` when and how."]


def _cut(
    source: _Source, time_column: str | None, window: TimeWindow, store: ArtifactStore
) -> TableRef:
    """The rows of the window as a table of their own."""
    from tasks.contracts.data import TableRef
    from tasks.validation.profiling import write_window

    def build(folder: StagedFolder) -> TableRef:
        target = folder.path / f"{source.name}.parquet"
        count = write_window(source.files, time_column, window, target)
        return TableRef(name=source.name, artifact=folder.artifact(target.name), num_rows=count)

    return store.build_once("baseline", source.suite.suite, TableRef, build)


def _sources(
    window: TimeWindow, config: PipelineConfig, suites: Suites, settings: Settings
) -> Iterator[_Source]:
    from tasks.features.tables.build import published_path
    from tasks.features.tables.landing import land_raw_rows

    store = settings.store
    landed = land_raw_rows(window, config.features, settings.feature_repo, store)
    for table in landed.tables:
        yield _Source(table.name, suites.rows[table.name], store.path(table.artifact))
    folder = published_path(settings.features_home)
    for name, suite in suites.tables.items():
        if (folder / name).is_dir():
            yield _Source(name, suite, folder / name)
    if snapshot := _snapshot_with(window, store):
        yield _Source("snapshot", suites.training_set, snapshot)


def _snapshot_with(window: TimeWindow, store: ArtifactStore) -> Path | None:
    """The newest kept training set that covers the window."""
    from tasks.contracts.data import FeatureSnapshot

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
