"""Faults of a replay: the world in which a feed is broken, and what the system's checks say of it.

Nothing is published: faulty rows, tables and training sets are versions in the artifact store that
no reader is led to. The checks are those of the daily system, each at a virtual moment at which it
would run. What the undisturbed history shows at the same moment is no sighting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

import duckdb
import pyarrow.parquet as pq

from flows.candidate import with_encoded
from flows.config import PipelineConfig, Suites, suites_of
from flows.drift_check import columns_with_unit
from flows.feature_refresh import bounded_suites
from tasks.contracts.base import TimeWindow
from tasks.contracts.clock import ClockConfig
from tasks.contracts.data import (
    DatasetSchema,
    FeatureSnapshot,
    FeatureTables,
    LandedRows,
    TableRef,
    ValidatedDataset,
    ValidatedRows,
    ValidationResult,
)
from tasks.contracts.drift import DriftReport, DriftResult
from tasks.contracts.replay import FalseAlarms, FaultKind, Sighting
from tasks.evaluation.config import MonitoringConfig
from tasks.evaluation.drift.compare import compare_features, open_windows
from tasks.evaluation.monitoring.alerts import AlertEvent
from tasks.evaluation.monitoring.monitor import find_alerts
from tasks.features.injection import Fault, flip_labels, inject
from tasks.features.injection import parse_faults as parse_faults
from tasks.features.offline.duck import parquet, sql_moment, sql_name, sql_text
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, build_feature_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.imports.encoded import encode_snapshot
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder, content_key
from tasks.validation.outcome import SuiteOutcome
from tasks.validation.runner import validate_snapshot, validate_table
from tasks.validation.suites import Suite

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FIRST_HOURS = (1, 3, 6, 12, 23)
"""Hours after its start at which a fault is looked for on its first day; then once a day."""
REFRESH_DELAY, DRIFT_TIME = timedelta(minutes=5), timedelta(hours=6, minutes=30)
"""As prefect.yaml schedules the refresh and the drift check, UTC."""
CUT = "cut_tables"
UNDONE = "Nothing was published"


@dataclass(frozen=True)
class World:
    """A history: its landed rows, the feature tables and the training set made of them.

    Args:
        landed: raw rows.
        tables: None where they cannot be made of these rows.
        dataset: None where the tables, or it, cannot be made.
        refused: why, in the words of the check that refused.
    """

    landed: LandedRows
    tables: FeatureTables | None
    dataset: ValidatedDataset | None
    refused: str | None = None


@dataclass(frozen=True)
class FaultyWorld:
    """The history with one fault.

    Args:
        fault: as it was asked for.
        described: what was changed, in a sentence.
        size: see `FaultResult.size`.
        named: the table and columns that are broken.
        world: what was made of the broken rows.
    """

    fault: Fault
    described: str
    size: float | None
    named: frozenset[str]
    world: World

    @property
    def dataset(self) -> ValidatedDataset | None:
        """The training set of the faulty history; None where none can be made of it."""
        return self.world.dataset

    @property
    def kind(self) -> FaultKind:
        """Kind of the fault."""
        return self.fault.kind

    @property
    def start(self) -> datetime:
        """First broken moment."""
        return self.fault.start

    @property
    def end(self) -> datetime | None:
        """First whole moment after it; None where the fault stays."""
        return self.fault.end


def undisturbed_world(config: PipelineConfig, settings: Settings) -> World:
    """The history as it is; a finished state holds all of it."""
    repo, store = settings.feature_repo, settings.store
    landed = land_raw_rows(config.window, config.features, repo, store)
    return _built(landed, "the undisturbed history", config, settings)


def faulty_world(fault: Fault, config: PipelineConfig, settings: Settings) -> FaultyWorld:
    """Break the history, and make of it what the system would make without its checks.

    Raises:
        ConfigurationError: the use case has no such target, or nothing would change.
    """
    repo, store = settings.feature_repo, settings.store
    whole = undisturbed_world(config, settings)
    if fault.kind == "labels-flipped":
        assert whole.dataset is not None
        snapshot = flip_labels(whole.dataset.snapshot, fault, store)
        broken = World(whole.landed, whole.tables, _unjudged(snapshot, str(fault)))
        label, share = snapshot.columns.label, float(fault.amount or 0)
        told = f"{share:.1%} of the labels ({label}) turned around from {fault.start:%Y-%m-%d} on"
        return FaultyWorld(fault, told, None, frozenset([label]), broken)
    units = _units(suites_of(config, repo))
    rows = inject(whole.landed, fault, config.features, store, units)
    broken = _built(rows.landed, str(fault), config, settings)
    named = frozenset([rows.table, *rows.columns])
    return FaultyWorld(fault, rows.described, rows.size, named, broken)


def _units(suites: Suites) -> dict[str, str]:
    return {
        f"{table}.{column}": unit
        for table, suite in suites.rows.items()
        for unit, columns in suite.units.items()
        for column in columns
    }


def _built(landed: LandedRows, what: str, config: PipelineConfig, settings: Settings) -> World:
    """Tables and training set of landed rows for which nothing vouches; not for publishing."""
    repo, store, features = settings.feature_repo, settings.store, config.features
    tables = None
    try:
        rows = ValidatedRows(landed=landed, validations=())
        tables = build_feature_tables(rows, EMPTY, features, repo, store)
        snapshot = build_training_set(tables, config.window, features, settings)
        if encoded := features.training_set.encoded:
            snapshot = encode_snapshot(snapshot, encoded, repo, store)
    except DataContractError as exc:
        return World(landed, tables, None, str(exc))
    suite = with_encoded(suites_of(config, repo).training_set, snapshot)
    try:
        return World(landed, tables, validate_snapshot(snapshot, suite, store))
    except DataContractError as exc:
        return World(landed, tables, _unjudged(snapshot, what), str(exc))


def _unjudged(snapshot: FeatureSnapshot, what: str) -> ValidatedDataset:
    """A training set that is broken on purpose, in the form that scoring and training take."""
    result = ValidationResult(
        suite="none",
        subject="snapshot",
        subject_sha256=snapshot.data.sha256,
        num_rows=snapshot.num_rows,
        num_expectations=1,
        result=snapshot.data,
        warnings=(f"broken on purpose by {what}; no suite vouches for these rows",),
    )
    return ValidatedDataset(snapshot=snapshot, validation=result)


def sightings(
    faulty: FaultyWorld, config: PipelineConfig, settings: Settings, days: int = 14
) -> tuple[Sighting, ...]:
    """The first time that each part of the system notices a fault, in order of time.

    Args:
        faulty: the broken history.
        config: the use case; its splits' training window is the reference of the drift check.
        settings: where the state is.
        days: how long after its start a fault is looked for.
    """
    looks = _Looks(faulty, undisturbed_world(config, settings), config, settings, days)
    found = (looks.rows(), looks.features(), looks.monitoring(), looks.drift())
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
    def clock(self) -> ClockConfig:
        return virtual_clock(self.config)

    @cached_property
    def hour(self) -> datetime:
        """The first full hour that the fault can be in."""
        start = self.faulty.start
        return start.replace(minute=0, second=0, microsecond=0) + HOUR * bool(
            start.minute or start.second
        )

    @cached_property
    def monitored(self) -> MonitoringConfig:
        """The monitoring with the longer part of its baseline that the fault leaves clean."""
        monitored, end = self.config.monitoring, self.faulty.end or self.config.window.end
        if (whole := monitored.baseline) is None:
            return monitored
        parts = ((whole.start, min(whole.end, self.hour)), (max(whole.start, end), whole.end))
        start, after = max(parts, key=lambda part: part[1] - part[0])
        if after <= start:
            return monitored
        clean = TimeWindow(start=start, end=after)
        return monitored.model_copy(update={"baseline": clean})

    def _moments(self) -> Iterator[datetime]:
        hours = [*FIRST_HOURS, *(24 * day + 23 for day in range(1, self.days))]
        for number in hours:
            moment = self.hour + number * HOUR
            if moment <= self.config.window.end:
                yield moment + REFRESH_DELAY

    def rows(self) -> Sighting | None:
        """Validation of the raw rows of each refresh."""
        suites = suites_of(self.config, self.settings.feature_repo).rows
        times = raw_times(self.config)
        both = self.faulty.world.landed.tables, self.whole.landed.tables
        return self._refused("validation of rows", both, times, None, suites)

    def features(self) -> Sighting | None:
        """Validation of the feature tables of each refresh: what is new, beside the baseline."""
        tables, whole = self.faulty.world.tables, self.whole.tables
        if tables is None or whole is None:
            moment = self.hour + HOUR + REFRESH_DELAY
            return self._sighting(moment, "validation of features", self.faulty.world.refused)
        config = self.config.model_copy(update={"monitoring": self.monitored})
        suites = suites_of(config, self.settings.feature_repo)
        bounded, both = bounded_suites(suites.tables, config), (tables.tables, whole.tables)
        times, baseline = view_times(config), self.monitored.baseline
        return self._refused("validation of features", both, times, baseline, bounded)

    def _refused(
        self,
        by: str,
        both: tuple[Sequence[TableRef], Sequence[TableRef]],
        times: Mapping[str, str],
        baseline: TimeWindow | None,
        suites: Mapping[str, Suite],
    ) -> Sighting | None:
        """The first refresh of which suites refuse a table that they let pass undisturbed."""
        store = self.settings.store
        for moment in self._moments():
            window = self.clock.newest_hours(moment)
            cut, usual = (cut_rows(each, times, window, baseline, store) for each in both)
            for one, other in zip(cut, usual, strict=True):
                if one.artifact.sha256 == other.artifact.sha256:
                    continue
                new = _broken(judged(one, cut, suites, window, store))
                known = _broken(judged(other, usual, suites, window, store)) if new else {}
                if told := [sentence for what, sentence in new.items() if what not in known]:
                    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
                    return self._sighting(moment, by, f"{one.name}: {told[0]}{more}")
        return None

    def monitoring(self) -> Sighting | None:
        """Alerts of the monitoring, day by day, of which the undisturbed history has none."""
        start, keys = self.hour - HOUR, self.config.view_keys
        end = min(start + self.days * DAY, self.config.window.end)
        broken, whole = self.faulty.world.tables, self.whole.tables
        if end - start < DAY or broken is None or whole is None or broken == whole:
            return None
        window = TimeWindow(start=start, end=end)
        found, usual = (
            find_alerts(tables, window, keys, self.monitored, self.settings.store)
            for tables in (broken, whole)
        )
        known = {alert.id for alert in usual}
        alert = next((alert for alert in found if alert.id not in known), None)
        if alert is None:
            return None
        moment = alert.time + REFRESH_DELAY
        return self._sighting(moment, "monitoring", alert.sentence)

    def drift(self) -> Sighting | None:
        """Data faults of the daily drift check."""
        for day in range(self.days + int(self.clock.label_hours // 24) + 1):
            midnight = (self.faulty.start + day * DAY).replace(hour=0, minute=0, second=0)
            moment = midnight + DRIFT_TIME
            window = self.clock.newest_days(moment)
            if window.end <= self.faulty.start or not self.config.window.contains(window):
                continue
            found = self._faults(self.faulty.world, window)
            usual = {_column(fault) for fault in self._faults(self.whole, window)} if found else ()
            if new := [fault for fault in found if _column(fault) not in usual]:
                return self._sighting(moment, "drift check", "; ".join(new[:3]))
        return None

    def _faults(self, world: World, window: TimeWindow) -> list[str]:
        """Faults of the data in a window of a drift check; none where too few days have rows."""
        whole, config = self.whole.dataset, self.config
        if world.dataset is None or whole is None or not self.columns:
            return []
        reference, store = config.splits.train, self.settings.store
        try:
            windows = open_windows(whole, reference, world.dataset, window, config.drift, store)
        except WindowError:
            return []
        units = columns_with_unit(config, self.settings.feature_repo)
        return compare_features(self.columns, windows, config.drift, units)[1]

    @cached_property
    def columns(self) -> DatasetSchema | None:
        """The features that the fault changed: no other can show what it did not before."""
        broken, whole = self.faulty.dataset, self.whole.dataset
        if broken is None or whole is None:
            return None
        one, other = (
            pq.read_table(self.settings.store.path(each.snapshot.data)) for each in (broken, whole)
        )

        def changed(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(name for name in names if not one[name].equals(other[name]))

        spec = whole.snapshot.columns
        found = {"numeric": changed(spec.numeric), "categorical": changed(spec.categorical)}
        return spec.model_copy(update=found) if any(found.values()) else None

    def _sighting(self, moment: datetime, by: str, told: str | None) -> Sighting:
        words = re.split(r"[^a-z0-9_]+|__", (told or "").lower())
        at = datetime.fromtimestamp(moment.timestamp(), UTC)
        names = bool(self.faulty.named & set(words))
        return Sighting.model_validate({"at": at, "by": by, "sentence": told, "names_cause": names})


def virtual_clock(config: PipelineConfig) -> ClockConfig:
    """The clock of a replay: a moment of the history is itself."""
    return config.clock.model_copy(update={"replay_year": None})


def raw_times(config: PipelineConfig) -> dict[str, str]:
    """Column of the moments, of raw tables with history."""
    return {t.name: t.time_column for t in config.features.raw_tables if t.time_column}


def view_times(config: PipelineConfig) -> dict[str, str]:
    """The same of feature tables."""
    return dict.fromkeys(config.view_keys, "event_timestamp")


def _column(fault: str) -> str:
    return fault.split(":")[0]


def judged(
    table: TableRef,
    others: Iterable[TableRef],
    suites: Mapping[str, Suite],
    window: TimeWindow,
    store: ArtifactStore,
) -> SuiteOutcome:
    """What the suite of a table says of it, be it good or bad."""
    seen: list[SuiteOutcome] = []
    references = {ref.name: ref for ref in others}
    try:
        validate_table(table, suites[table.name], window, store, UNDONE, seen.append, references)
    except DataContractError:
        if not seen:
            raise
    return seen[0]


def _broken(outcome: SuiteOutcome) -> dict[str, str]:
    """What was refused, by what it is about."""
    checks = outcome.with_status("failed")
    broken = {fault: fault for fault in outcome.table_faults}
    return broken | {f"{check.entry} {check.columns}": check.sentence for check in checks}


def cut_rows(
    tables: Sequence[TableRef],
    times: Mapping[str, str],
    window: TimeWindow,
    baseline: TimeWindow | None,
    store: ArtifactStore,
) -> tuple[TableRef, ...]:
    """The tables as one refresh of a window has them, with rows of a baseline; kept in the store.

    Args:
        tables: of the whole history.
        times: column of the moments, of tables with history; others stay as they are.
        window: the newest rows.
        baseline: further rows that suites compare with, if they are before the window's end.
        store: holds the tables, and takes the cut ones.
    """
    return tuple(
        _cut(table, times[table.name], window, baseline, store) if table.name in times else table
        for table in tables
    )


def _cut(
    table: TableRef,
    time: str,
    window: TimeWindow,
    baseline: TimeWindow | None,
    store: ArtifactStore,
) -> TableRef:
    key = content_key(table, time, window, baseline)
    moment = sql_name(time)

    def within(each: TimeWindow) -> str:
        start, end = sql_moment(each.start), sql_moment(min(each.end, window.end))
        return f"{moment} >= {start} AND {moment} < {end}"

    def build(folder: StagedFolder) -> TableRef:
        target = folder.path / f"{table.name}.parquet"
        kept = " OR ".join(f"({within(each)})" for each in (window, baseline) if each)
        rows = f"SELECT * FROM {parquet(store.path(table.artifact, verify=False))} WHERE {kept}"
        with duckdb.connect() as con:
            con.execute("SET TimeZone = 'UTC'")
            con.execute("SET threads = 1")
            found = con.execute(f"COPY ({rows}) TO {sql_text(target)} (FORMAT parquet)").fetchall()
        artifact = folder.artifact(target.name)
        return TableRef(name=table.name, artifact=artifact, num_rows=int(found[0][0]))

    return store.build_once(CUT, key, TableRef, build)


def false_alarms(
    config: PipelineConfig,
    settings: Settings,
    window: TimeWindow,
    reports: Mapping[datetime, DriftReport],
) -> FalseAlarms:
    """What the checks of the daily system say of the undisturbed history.

    Rows and feature tables are judged in windows as long as those of a refresh, one after the
    other, so that each row is judged once; alerts are those of every day.

    Args:
        config: the use case.
        settings: where the state is.
        window: days to judge.
        reports: result of each drift check in them, by its moment.
    """
    world = undisturbed_world(config, settings)
    refused = dict(_refusals(world, config, settings, window))
    alerts: tuple[AlertEvent, ...] = ()
    if world.tables is not None:
        keys, monitored = config.view_keys, config.monitoring
        alerts = find_alerts(world.tables, window, keys, monitored, settings.store)
    kinds = {(alert.view, alert.kind): alert.sentence for alert in reversed(alerts)}
    faults = [r for r in reports.values() if r.result is DriftResult.DATA_FAULT]
    return FalseAlarms(
        num_days=max(1, (window.end - window.start) // DAY),
        refused=sum((part.end - part.start) // DAY for part in refused),
        alerts=len({alert.time.date() for alert in alerts}),
        data_faults=len(faults),
        sentences=(
            *dict.fromkeys(refused.values()),
            *kinds.values(),
            *(report.evidence[0] for report in faults[:1]),
        ),
    )


def _refusals(
    world: World, config: PipelineConfig, settings: Settings, window: TimeWindow
) -> Iterator[tuple[TimeWindow, str]]:
    """Windows of which a suite refuses a table with history, and what it refuses first."""
    store, suites = settings.store, suites_of(config, settings.feature_repo)
    span = timedelta(hours=max(24, config.clock.refresh_hours))
    tables = world.tables.tables if world.tables else ()
    bounded, baseline = bounded_suites(suites.tables, config), config.monitoring.baseline
    for number in range((window.end - window.start) // span):
        start = window.start + number * span
        part = TimeWindow(start=start, end=start + span)
        for refs, times, base, judges in (
            (world.landed.tables, raw_times(config), None, suites.rows),
            (tables, view_times(config), baseline, bounded),
        ):
            cut = cut_rows(refs, times, part, base, store)
            for ref in cut:
                if ref.name in times and (told := judged(ref, cut, judges, part, store).faults):
                    yield part, f"{ref.name}: {told[0]}"
