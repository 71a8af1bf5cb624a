"""Faults of a replay: the world in which a feed is broken, and what the system's checks say of it.

Nothing is published: faulty rows, tables and training sets are versions in the artifact store that
no reader is led to. The checks are those of the daily system, each at a virtual moment at which it
would run. What the undisturbed history shows at the same moment is no sighting.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property

import pyarrow.parquet as pq

from flows.candidate import with_encoded
from flows.config import PipelineConfig, suites_of
from flows.drift_check import columns_with_unit
from flows.feature_refresh import bounded_suites
from flows.replay.history import CHECKED_AT
from flows.replay.permuted import unjudged
from tasks.contracts import data
from tasks.contracts.base import TimeWindow
from tasks.contracts.replay import FalseAlarms, Sighting
from tasks.evaluation.config import MonitoringConfig
from tasks.evaluation.drift.compare import compare_features, open_windows
from tasks.evaluation.monitoring.monitor import find_alerts
from tasks.features.injection import Fault, flip_labels, inject
from tasks.features.offline.duck import duckdb_session, inside, parquet, sql_text
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, build_feature_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.imports.encoded import encode_snapshot
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder, content_key
from tasks.validation.outcome import SuiteOutcome
from tasks.validation.runner import validate_snapshot, validate_table
from tasks.validation.suites import Suite

HOUR, DAY, WEEK = timedelta(hours=1), timedelta(days=1), timedelta(days=7)
FIRST_HOURS = (1, 3, 6, 12, 23)
"""Hours after its start at which a fault is looked for on its first day; then once a day."""
REFRESH_DELAY = timedelta(minutes=5)
"""As prefect.yaml schedules the refresh."""


@dataclass(frozen=True)
class World:
    """A history: its landed rows, the feature tables and the training set made of them.

    Args:
        landed: raw rows.
        tables: None where they cannot be made of these rows.
        dataset: None where the tables, or it, cannot be made.
        refused: why, in the words of the check that refused.
    """

    landed: data.LandedRows
    tables: data.FeatureTables | None
    dataset: data.ValidatedDataset | None
    refused: str | None


@dataclass(frozen=True)
class FaultyWorld(World):
    """The history with one fault.

    Args:
        fault: as it was asked for.
        described: what was changed, in a sentence.
        size: see `FaultResult.size`.
        named: the table and columns that are broken.
    """

    fault: Fault
    described: str
    named: frozenset[str]
    size: float | None = None

    def sighting(self, moment: datetime, by: str, sentence: str | None) -> Sighting:
        """What a part of the system noticed of it at a moment."""
        at = datetime.fromtimestamp(moment.timestamp(), UTC)
        words = set(re.split(r"[^a-z0-9_]+|__", (sentence or "").lower()))
        seen = {"at": at, "by": by, "sentence": sentence, "names_cause": bool(self.named & words)}
        return Sighting.model_validate(seen)


def undisturbed_world(config: PipelineConfig, settings: Settings) -> World:
    """The history as it is; a finished state holds all of it."""
    repo, store = settings.feature_repo, settings.store
    return _built(land_raw_rows(config.window, config.features, repo, store), config, settings)


def faulty_world(fault: Fault, config: PipelineConfig, settings: Settings) -> FaultyWorld:
    """Break the history, and make of it what the system would make without its checks.

    Raises:
        ConfigurationError: the use case has no such target, or nothing would change.
    """
    whole = undisturbed_world(config, settings)
    if fault.kind == "labels-flipped" and whole.dataset is not None:
        snapshot = flip_labels(whole.dataset.snapshot, fault, settings.store)
        broken, label = replace(whole, dataset=unjudged(snapshot)), snapshot.columns.label
        since = f"from {fault.start:%Y-%m-%d %H:%MZ} on"
        told = f"{fault.amount:.1%} of the labels ({label}) turned around {since}"
        return FaultyWorld(**vars(broken), fault=fault, described=told, named=frozenset([label]))
    suites = suites_of(config, settings.feature_repo).rows.items()
    declared = [(name, *pair) for name, suite in suites for pair in suite.units.items()]
    units = {f"{name}.{column}": unit for name, unit, columns in declared for column in columns}
    rows = inject(whole.landed, fault, config.features, settings.store, units)
    told, named = rows.described, frozenset([rows.table, *rows.columns])
    broken = _built(rows.landed, config, settings)
    return FaultyWorld(**vars(broken), fault=fault, described=told, named=named, size=rows.size)


def _built(landed: data.LandedRows, config: PipelineConfig, settings: Settings) -> World:
    """Tables and training set of landed rows for which nothing vouches; not for publishing."""
    repo, store, features = settings.feature_repo, settings.store, config.features
    tables = snapshot = None
    try:
        rows = data.ValidatedRows(landed=landed, validations=())
        tables = build_feature_tables(rows, EMPTY, features, repo, store)
        snapshot = build_training_set(tables, config.window, features, settings)
        if encoded := features.training_set.encoded:
            snapshot = encode_snapshot(snapshot, encoded, repo, store)
        suite = with_encoded(suites_of(config, repo).training_set, snapshot)
        return World(landed, tables, validate_snapshot(snapshot, suite, store), None)
    except DataContractError as exc:
        return World(landed, tables, unjudged(snapshot) if snapshot else None, str(exc))


def sightings(
    faulty: FaultyWorld, config: PipelineConfig, settings: Settings, days: int = 14
) -> tuple[Sighting, ...]:
    """The first time that each part of the system notices a fault, in order of time.

    Rows that their validation refuses at once never become features, so nothing later is asked.

    Args:
        faulty: the broken history.
        config: the use case on a clock that shows the virtual moment, with the splits of the
            champion: its training window is the reference of the drift check.
        settings: where the state is.
        days: how long after its start a fault is looked for.
    """
    looks = _Looks(faulty, undisturbed_world(config, settings), config, settings, days)
    refused = looks.rows()
    if refused is not None and refused.at - faulty.fault.start <= DAY:
        return (refused,)
    found = (refused, looks.features(), looks.monitoring(), looks.drift())
    return tuple(sorted(filter(None, found), key=lambda sighting: sighting.at))


@dataclass(frozen=True)
class _Looks:
    """The checks of the daily system on a faulty history, beside the undisturbed one."""

    faulty: FaultyWorld
    whole: World
    config: PipelineConfig
    settings: Settings
    days: int

    @cached_property
    def hour(self) -> datetime:
        """The first full hour that the fault can be in."""
        start = self.faulty.fault.start
        return start + (HOUR - timedelta(seconds=start.minute * 60 + start.second)) % HOUR

    @cached_property
    def monitored(self) -> MonitoringConfig:
        """The monitoring with the part of its baseline that was known before the fault, if any."""
        whole = self.config.monitoring.baseline
        if whole is None or self.hour <= whole.start:
            return self.config.monitoring
        known = whole.model_copy(update={"end": min(whole.end, self.hour)})
        return self.config.monitoring.model_copy(update={"baseline": known})

    def rows(self) -> Sighting | None:
        """Validation of the raw rows of each refresh."""
        suites = suites_of(self.config, self.settings.feature_repo).rows
        both = self.faulty.landed.tables, self.whole.landed.tables
        return self._refused("validation of rows", both, _raw_times(self.config), None, suites)

    def features(self) -> Sighting | None:
        """Validation of the feature tables of each refresh: what is new, beside the baseline."""
        tables, whole, by = self.faulty.tables, self.whole.tables, "validation of features"
        if tables is None or whole is None:
            return self.faulty.sighting(self.hour + HOUR + REFRESH_DELAY, by, self.faulty.refused)
        config = self.config.model_copy(update={"monitoring": self.monitored})
        suites = bounded_suites(suites_of(config, self.settings.feature_repo).tables, config)
        times = dict.fromkeys(config.view_keys, "event_timestamp")
        both = (tables.tables, whole.tables)
        return self._refused(by, both, times, self.monitored.baseline, suites)

    def _refused(
        self,
        by: str,
        both: tuple[Sequence[data.TableRef], Sequence[data.TableRef]],
        times: Mapping[str, str],
        baseline: TimeWindow | None,
        suites: Mapping[str, Suite],
    ) -> Sighting | None:
        """The first refresh of which suites refuse a table that they let pass undisturbed."""
        store, clock = self.settings.store, self.config.clock
        for hours in (*FIRST_HOURS, *(24 * day + 23 for day in range(1, self.days))):
            window = clock.newest_hours(moment := self.hour + hours * HOUR + REFRESH_DELAY)
            if window.end > self.config.window.end:
                break
            cut, usual = (cut_rows(each, times, window, baseline, store) for each in both)
            for one, other in zip(cut, usual, strict=True):
                if one.artifact.sha256 == other.artifact.sha256:
                    continue
                new = _judged(one, cut, suites, window, store)
                known = _judged(other, usual, suites, window, store) if new else {}
                if told := [sentence for what, sentence in new.items() if what not in known]:
                    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
                    return self.faulty.sighting(moment, by, f"{one.name}: {told[0]}{more}")
        return None

    def monitoring(self) -> Sighting | None:
        """Alerts of the monitoring, day by day, of which the undisturbed history has none."""
        start, keys, monitored = self.hour - HOUR, self.config.view_keys, self.monitored
        end = min(start + self.days * DAY, self.config.window.end)
        broken, whole = self.faulty.tables, self.whole.tables
        if end - start < DAY or broken is None or whole is None or broken == whole:
            return None
        window, store = TimeWindow(start=start, end=end), self.settings.store
        known = {alert.id for alert in find_alerts(whole, window, keys, monitored, store)}
        for alert in find_alerts(broken, window, keys, monitored, store):
            if alert.id not in known:
                moment = alert.time + REFRESH_DELAY
                return self.faulty.sighting(moment, "monitoring", alert.sentence)
        return None

    def drift(self) -> Sighting | None:
        """Data faults of the daily drift check."""
        start = self.faulty.fault.start.astimezone(UTC)
        for day in range(self.days + 1 if self.columns else 0):
            moment = datetime.combine(start.date() + day * DAY, CHECKED_AT, UTC)
            window = self.config.clock.newest_days(moment)
            if window.end <= start or not self.config.window.contains(window):
                continue
            new = self._faults(self.faulty, window)
            usual = self._faults(self.whole, window) if new else []
            known = {fault.split(":")[0] for fault in usual}
            if told := [fault for fault in new if fault.split(":")[0] not in known]:
                return self.faulty.sighting(moment, "drift check", "; ".join(told[:3]))
        return None

    def _faults(self, world: World, window: TimeWindow) -> list[str]:
        """Faults of the data in a window of a drift check; none where too few days have rows."""
        whole, config = self.whole.dataset, self.config
        if world.dataset is None or whole is None or self.columns is None:
            return []
        train, store, repo = config.splits.train, self.settings.store, self.settings.feature_repo
        try:
            windows = open_windows(whole, train, world.dataset, window, config.drift, store)
        except WindowError:
            return []
        units = columns_with_unit(config, repo)
        return list(compare_features(self.columns, windows, config.drift, units).faults)

    @cached_property
    def columns(self) -> data.DatasetSchema | None:
        """The features that the fault changed: no other can show what it did not before."""
        broken, whole, store = self.faulty.dataset, self.whole.dataset, self.settings.store
        if broken is None or whole is None:
            return None
        one, other = (pq.read_table(store.path(d.snapshot.data)) for d in (broken, whole))
        spec = whole.snapshot.columns
        kinds = {"numeric": spec.numeric, "categorical": spec.categorical}
        changed = {
            kind: tuple(name for name in names if not one[name].equals(other[name]))
            for kind, names in kinds.items()
        }
        return spec.model_copy(update=changed) if any(changed.values()) else None


def _raw_times(config: PipelineConfig) -> dict[str, str]:
    """Column of the moments, of raw tables with history."""
    return {t.name: t.time_column for t in config.features.raw_tables if t.time_column}


def _judged(
    table: data.TableRef,
    others: Sequence[data.TableRef],
    suites: Mapping[str, Suite],
    window: TimeWindow,
    store: ArtifactStore,
) -> dict[str, str]:
    """What the suite of a table refuses of it, in words, by what it is about."""
    seen: list[SuiteOutcome] = []
    suite, undone, refs = suites[table.name], "Nothing was published", {r.name: r for r in others}
    try:
        validate_table(table, suite, window, store, undone, seen.append, refs)
    except DataContractError:
        failed = {f"{c.entry} {c.columns}": c.sentence for c in seen[0].with_status("failed")}
        return {fault: fault for fault in seen[0].table_faults} | failed
    return {}


def cut_rows(
    tables: Sequence[data.TableRef],
    times: Mapping[str, str],
    window: TimeWindow,
    baseline: TimeWindow | None,
    store: ArtifactStore,
) -> tuple[data.TableRef, ...]:
    """The tables as one refresh of a window has them, with rows of a baseline; kept in the store.

    Args:
        tables: of the whole history.
        times: column of the moments, of tables with history; others stay as they are.
        window: the newest rows.
        baseline: further rows that suites compare with, if they are before the window's end.
        store: holds the tables, and takes the cut ones.
    """

    def cut(table: data.TableRef) -> data.TableRef:
        def build(folder: StagedFolder) -> data.TableRef:
            time, target = times[table.name], folder.path / f"{table.name}.parquet"
            kept = [window]
            if baseline and baseline.start < window.end:
                kept.append(baseline.model_copy(update={"end": min(baseline.end, window.end)}))
            condition = " OR ".join(inside(time, each) for each in kept)
            rows = f"SELECT * FROM {parquet(store.path(table.artifact, verify=False))}"
            with duckdb_session(folder.path.parent, threads=1) as con:
                con.execute(f"COPY ({rows} WHERE {condition}) TO {sql_text(target)}")
            num_rows = pq.read_metadata(target).num_rows
            artifact = folder.artifact(target.name)
            return data.TableRef(name=table.name, artifact=artifact, num_rows=num_rows)

        key = content_key(table, times[table.name], window, baseline)
        return store.build_once("cut_tables", key, data.TableRef, build)

    return tuple(cut(table) if table.name in times else table for table in tables)


def false_alarms(
    config: PipelineConfig, settings: Settings, window: TimeWindow, faults: Sequence[str]
) -> FalseAlarms:
    """What the checks of the daily system say of the undisturbed history.

    Raw rows are judged a week at a time, so that each is judged once; alerts are those of every
    day.

    Args:
        config: the use case.
        settings: where the state is.
        window: days to judge.
        faults: what the drift checks took for a fault of the data, a sentence a day.

    Raises:
        DataContractError: the history itself cannot be built.
    """
    world, store, keys = undisturbed_world(config, settings), settings.store, config.view_keys
    if world.tables is None:
        raise DataContractError(str(world.refused))
    refused = list(_refusals(world, config, settings, window))
    alerts = find_alerts(world.tables, window, keys, config.monitoring, store)
    kinds = {(alert.view, alert.kind): alert.sentence for alert in reversed(alerts)}
    return FalseAlarms(
        num_days=max(1, (window.end - window.start) // DAY),
        refused=len(refused),
        alerts=len({alert.time.date() for alert in alerts}),
        data_faults=len(faults),
        sentences=(*refused[:1], *kinds.values(), *faults[:1]),
    )


def _refusals(
    world: World, config: PipelineConfig, settings: Settings, window: TimeWindow
) -> Iterator[str]:
    """What a suite refuses first in each week of a raw table with history."""
    store, suites = settings.store, suites_of(config, settings.feature_repo).rows
    for number in range((window.end - window.start) // WEEK):
        start = window.start + number * WEEK
        part, times = TimeWindow(start=start, end=start + WEEK), _raw_times(config)
        cut = cut_rows(world.landed.tables, times, part, None, store)
        for ref in cut:
            if ref.name in times and (told := _judged(ref, cut, suites, part, store)):
                yield f"{ref.name}: {next(iter(told.values()))}"
