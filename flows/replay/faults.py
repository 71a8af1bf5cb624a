"""Faults of a replay: the world in which a feed is broken, and what the system's checks say of it.

Nothing is published: faulty rows, tables and training sets are versions in the artifact store that
no reader is led to. The checks are those of the daily system, each at a virtual moment at which it
would run. What the undisturbed history shows at the same moment is no sighting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

import duckdb

from flows.candidate import with_encoded
from flows.config import PipelineConfig, Suites, suites_of
from flows.drift_check import columns_with_unit
from flows.feature_refresh import bounded_suites
from tasks.contracts.base import TimeWindow
from tasks.contracts.clock import ClockConfig
from tasks.contracts.data import (
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
from tasks.evaluation.drift.compare import compare_features, open_windows
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
REFRESH_MINUTE, DRIFT_TIME = 5, timedelta(hours=6, minutes=30)
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

    def _moments(self) -> Iterator[datetime]:
        hours = [*FIRST_HOURS, *(24 * day + 23 for day in range(1, self.days))]
        for number in hours:
            moment = self.hour + number * HOUR
            if moment <= self.config.window.end:
                yield moment + timedelta(minutes=REFRESH_MINUTE)

    def rows(self) -> Sighting | None:
        """Validation of the raw rows of each refresh."""
        suites = suites_of(self.config, self.settings.feature_repo).rows
        for moment in self._moments():
            window = self.clock.newest_hours(moment)
            both = [
                cut_rows(world.landed.tables, self._times(), window, None, self.settings.store)
                for world in (self.faulty.world, self.whole)
            ]
            if told := self._new_faults(*both, suites, window):
                return self._sighting(moment, "validation of rows", told)
        return None

    def features(self) -> Sighting | None:
        """Validation of the feature tables of each refresh: what is new, beside the baseline."""
        tables, whole = self.faulty.world.tables, self.whole.tables
        if tables is None or whole is None:
            moment = self.hour + HOUR + timedelta(minutes=REFRESH_MINUTE)
            return self._sighting(moment, "validation of features", self.faulty.world.refused)
        suites = self.table_suites
        times = dict.fromkeys(self.config.view_keys, "event_timestamp")
        for moment in self._moments():
            window = self.clock.newest_hours(moment)
            baseline = self.config.monitoring.baseline
            both = [
                cut_rows(world.tables, times, window, baseline, self.settings.store)
                for world in (tables, whole)
            ]
            if told := self._new_faults(*both, suites, window):
                return self._sighting(moment, "validation of features", told)
        return None

    @cached_property
    def table_suites(self) -> dict[str, Suite]:
        suites = suites_of(self.config, self.settings.feature_repo)
        return bounded_suites(suites.tables, self.config)

    def monitoring(self) -> Sighting | None:
        """Alerts of the monitoring, day by day, of which the undisturbed history has none."""
        end = min(self.hour - HOUR + self.days * DAY, self.config.window.end)
        if end - (self.hour - HOUR) < DAY or self.faulty.world.tables is None:
            return None
        window = TimeWindow(start=self.hour - HOUR, end=end)
        found, usual = (
            find_alerts(
                world.tables,
                window,
                self.config.view_keys,
                self.config.monitoring,
                self.settings.store,
            )
            for world in (self.faulty.world, self.whole)
            if world.tables is not None
        )
        known = {alert.id for alert in usual}
        alert = next((alert for alert in found if alert.id not in known), None)
        if alert is None:
            return None
        moment = alert.time + timedelta(minutes=REFRESH_MINUTE)
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
        if world.dataset is None or self.whole.dataset is None:
            return []
        try:
            windows = open_windows(
                self.whole.dataset,
                self.config.splits.train,
                world.dataset,
                window,
                self.config.drift,
                self.settings.store,
            )
        except WindowError:
            return []
        columns = self.whole.dataset.snapshot.columns
        units = columns_with_unit(self.config)
        return compare_features(columns, windows, self.config.drift, units)[1]

    def _times(self) -> dict[str, str]:
        return {t.name: t.time_column for t in self.config.features.raw_tables if t.time_column}

    def _new_faults(
        self,
        found: Sequence[TableRef],
        usual: Sequence[TableRef],
        suites: dict[str, Suite],
        window: TimeWindow,
    ) -> str | None:
        """What a suite refuses of the one and not of the other, in words."""
        for one, other in zip(found, usual, strict=True):
            if one.artifact.sha256 == other.artifact.sha256:
                continue
            judge = lambda ref, others: judged(ref, others, suites, window, self.settings.store)  # noqa: E731
            if new := _broken(judge(one, found)):
                known = _broken(judge(other, usual))
                if told := [sentence for what, sentence in new.items() if what not in known]:
                    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
                    return f"{one.name}: {told[0]}{more}"
        return None

    def _sighting(self, moment: datetime, by: str, told: str | None) -> Sighting:
        words = re.split(r"[^a-z0-9_]+|__", (told or "").lower())
        names = bool(self.faulty.named & set(words))
        return Sighting.model_validate(
            {"at": moment, "by": by, "sentence": told, "names_cause": names}
        )


def virtual_clock(config: PipelineConfig) -> ClockConfig:
    """The clock of a replay: a moment of the history is itself."""
    return config.clock.model_copy(update={"replay_year": None})


def _column(fault: str) -> str:
    return fault.split(":")[0]


def judged(
    table: TableRef,
    others: Iterable[TableRef],
    suites: dict[str, Suite],
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
    times: dict[str, str],
    window: TimeWindow,
    baseline: TimeWindow | None,
    store: ArtifactStore,
) -> tuple[TableRef, ...]:
    """The tables as one refresh of a window has them, with the rows of a baseline; kept in the store.

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
    reports: Sequence[tuple[datetime, DriftReport]] = (),
    told: Callable[[str], None] = lambda text: None,
) -> FalseAlarms:
    """What the checks of the daily system say of the undisturbed history.

    Rows are judged in windows of a refresh, one after the other, so that each row is judged once;
    feature tables in the same windows by the rules that ask for the window, and by those on single
    rows once over all. Alerts and drift are those of every day.

    Args:
        config: the use case.
        settings: where the state is.
        window: days to judge.
        reports: day and result of each drift check in it.
        told: called with the progress.
    """
    world, store = undisturbed_world(config, settings), settings.store
    assert world.tables is not None
    suites = suites_of(config, settings.feature_repo)
    refused: dict[datetime, str] = {}
    span = timedelta(hours=config.clock.refresh_hours)
    raw = {t.name: t.time_column for t in config.features.raw_tables if t.time_column}
    views = dict.fromkeys(config.view_keys, "event_timestamp")
    tables = bounded_suites(suites.tables, config)
    start = window.start
    while start + span <= window.end:
        part = TimeWindow(start=start, end=start + span)
        start += span
        rows = cut_rows(world.landed.tables, raw, part, None, store)
        features = cut_rows(world.tables.tables, views, part, config.monitoring.baseline, store)
        for refs, judges in ((rows, suites.rows), (features, tables)):
            for ref in refs:
                if ref.name not in (raw if refs is rows else views):
                    continue
                if faults := judged(ref, refs, judges, part, store).faults:
                    refused.setdefault(part.start, f"{ref.name}: {faults[0]}")
        told(f"undisturbed history judged up to {part.end:%Y-%m-%d}")
    alerts = find_alerts(world.tables, window, config.view_keys, config.monitoring, store)
    kinds = {(alert.view, alert.kind): alert.sentence for alert in reversed(alerts)}
    faults = [report for _, report in reports if report.result is DriftResult.DATA_FAULT]
    return FalseAlarms(
        num_days=max(1, window_days(window)),
        refused=len(refused) * max(1, config.clock.refresh_hours // 24),
        alerts=len({alert.time.date() for alert in alerts}),
        data_faults=len(faults),
        sentences=(
            *list(refused.values())[:5],
            *kinds.values(),
            *(report.evidence[0] for report in faults[:1]),
        ),
    )


def window_days(window: TimeWindow) -> int:
    """Whole days of a window."""
    return (window.end - window.start) // DAY
