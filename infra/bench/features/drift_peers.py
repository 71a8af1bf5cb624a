"""Delay until drift is noticed: our drift check, Evidently, NannyML and river on the same days.

A stream is held-out days of a use case in a random order, so nothing drifts: a reference, days that
fill the first window, and days that are judged. Changes begin at known days in copies; nobody has
labels of them yet. A limit of another library's detector is the lowest with at most one false alarm
in 100 days on some streams; ours are those that are shipped, chosen likewise on days of training;
all are judged on other streams. A change is noticed on the first day with an alarm that the
unchanged stream does not have. Days in their own order would have a season, which most detectors
take for drift.
"""

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from flows.config import read_pipeline_config
from flows.drift_check import columns_with_unit
from infra.bench.features import drift_libraries
from infra.bench.figures import LeftOut, Measured, at_most
from infra.bench.parts import Bench, newest_record
from infra.bench.running import traffic_loop
from tasks.contracts.base import TimeWindow
from tasks.evaluation.drift.compare import Windows, compare_features
from tasks.evaluation.drift.window import WindowColumns
from tasks.evaluation.scoring import Program
from tasks.kernel.settings import Settings, tool_python

LIBRARIES = ("evidently", "nannyml", "river")
REFERENCE, LEAD, JUDGED, WATCHED = 60, 28, 50, 28
"""Days of a stream: the reference, those of our check's window, those that are judged; and days of
a copy from a change on."""
FIRST = REFERENCE + LEAD
STARTS = (FIRST + 4, FIRST + 18)
GROWING_DAYS = 21
"""Until a gradual shift has its full size."""
DAY_ROWS, NUM_FEATURES = 100, 16
FIRST_SEED = 20
MAX_RATE, MAX_JUDGED_RATE = 0.01, 0.02
"""False alarms a day, on the streams that a limit is chosen on and on those that judge."""
GRADUAL = "gradual shift"
SHIFTS = {"shift of 1 sd": 1.0, "shift of 2 sd": 2.0, "shift of 4 sd": 4.0, GRADUAL: 2.0}
"""Standard deviations."""
KINDS = (*SHIFTS, "freeze")
EPOCH, DAY = datetime(2001, 1, 1, tzinfo=UTC), timedelta(days=1)
QUIET = {"OMP_NUM_THREADS": "1", "NML_DISABLE_USAGE_LOGGING": "1"}
"""One thread, and nothing that reports the use of NannyML to its authors."""


class Copy(NamedTuple):
    """A stream from its first judged day on, or one of its columns changed from `start` on."""

    stream: int
    kind: str = ""
    column: str = ""
    start: int = FIRST

    @property
    def days(self) -> range:
        """Those that are watched."""
        return range(self.start, self.start + (WATCHED if self.kind else JUDGED))


class Detector(NamedTuple):
    """What one detector showed.

    Attributes:
        rate: false alarms a day.
        delays: median days until a change was noticed, by kind; the first day is 1, and what was
            missed counts as one day more than was watched.
    """

    name: str
    rate: float
    delays: Sequence[float]

    @property
    def mean(self) -> float:
        """Of the delays."""
        return statistics.mean(self.delays)

    def __str__(self) -> str:
        """In words."""
        days = ", ".join(f"{days:g}" for days in self.delays)
        return f"{self.name} {self.mean:.3g} ({days}), {100 * self.rate:.1f} false alarms"


class UseCase:
    """Held-out rows and the model of a finished loop, and streams that are made of them.

    Args:
        settings: of the finished loop.
        folder: for streams.
        small: whether to make few.
    """

    def __init__(self, settings: Settings, folder: Path, small: bool) -> None:
        self.config, self.folder = read_pipeline_config(settings.feature_repo), folder
        self.units = columns_with_unit(self.config, settings.feature_repo)
        record = newest_record(settings)
        schema = record.dataset.snapshot.columns
        self.program = Program.open(record.model.program, schema, settings.store)
        rows = pd.read_parquet(settings.store.path(record.dataset.snapshot.data))
        self.time, start = schema.event_time, self.config.splits.validation.start
        days = [part for _, part in rows[rows[self.time] >= start].groupby(rows[self.time].dt.date)]
        least = statistics.median(map(len, days)) / 2  # part of a day is unlike a whole one
        self.days = [part for part in days if len(part) >= least]
        self.num_choosing, num_columns = (2, 1) if small else (4, 4)
        streams = [self.stream(FIRST_SEED + n) for n in range(2 * self.num_choosing)]
        # The numbers that go with scores most: what moves them matters.
        related = streams[-1][[*schema.numeric]].corrwith(streams[-1].score).abs()
        numeric = tuple(related.nlargest(NUM_FEATURES).index)
        self.schema = schema.model_copy(update={"numeric": numeric})
        self.copies = [Copy(number) for number in range(len(streams))]
        changes = product(KINDS, numeric[:num_columns], STARTS)
        for n, change in enumerate(changes):
            self.copies.append(Copy(self.num_choosing + n % self.num_choosing, *change))
        self._write([self.changed(streams[copy.stream], copy) for copy in self.copies])

    def stream(self, seed: int) -> pd.DataFrame:
        """Days in a random order, each drawn once as far as they reach, with scores."""
        draw, parts = np.random.default_rng(seed), []
        rounds = -(-(FIRST + JUDGED) // len(self.days))
        order = np.concatenate([draw.permutation(len(self.days)) for _ in range(rounds)])
        for number, which in enumerate(order[: FIRST + JUDGED]):
            part = self.days[which]
            chosen = draw.choice(len(part), min(len(part), DAY_ROWS), replace=False)
            part = part.iloc[np.sort(chosen)]
            moved = part[self.time] - part[self.time].dt.floor("D") + EPOCH + number * DAY
            parts.append(part.assign(**{self.time: moved, "day": number}))
        return self.scored(pd.concat(parts, ignore_index=True))

    def scored(self, rows: pd.DataFrame) -> pd.DataFrame:
        """With the model's score."""
        return rows.assign(score=self.program.score(rows).astype(float))

    def changed(self, rows: pd.DataFrame, copy: Copy) -> pd.DataFrame:
        """A stream up to the last watched day, with the change."""
        rows, new = rows[rows.day <= copy.days[-1]], rows.day >= copy.start
        if not copy.kind:
            return rows
        values = rows[copy.column].astype(float)
        if copy.kind in SHIFTS:
            grown = np.clip((rows.day - copy.start + 1) / GROWING_DAYS, 0, 1)
            size = SHIFTS[copy.kind] * (grown if copy.kind == GRADUAL else 1)
            after = values + size * values[rows.day < REFERENCE].std()
        else:
            after = values.where(values.isna(), values[new].dropna().iloc[0])
        return self.scored(rows.assign(**{copy.column: values.where(~new, after)}))

    def _write(self, tables: Sequence[pd.DataFrame]) -> None:
        """All copies, as the check and other libraries read them."""
        words, facts = [*self.schema.categorical], []
        for number, (copy, rows) in enumerate(zip(self.copies, tables, strict=True)):
            own = [copy.column] if copy.kind else [*words, *self.schema.numeric]
            about = {"reference": REFERENCE, "days": [*copy.days], "series": [*own, "score"]}
            facts.append({**about, "categorical": words})
            texts = rows[words].astype(object).fillna("(missing)").astype(str)
            numbers = rows[[*self.schema.numeric, "score"]].astype(float)
            table = pd.concat([texts, numbers, rows[["day", self.time]]], axis=1)
            table.to_parquet(self.folder / f"{number}.parquet", index=False)
        (self.folder / "copies.json").write_text(json.dumps(facts))

    def check(self) -> Detector:
        """Our check of features with its shipped limits; up to the first alarm of a change."""
        alarms: list[list[bool]] = []
        for number, copy in enumerate(self.copies):
            found: list[bool] = []
            for day in copy.days if copy.kind or copy.stream >= self.num_choosing else ():
                found.append(self._alarm(self.folder / f"{number}.parquet", day))
                if copy.kind and first_new(found, alarms[copy.stream][copy.start - FIRST :]):
                    break
            alarms.append(found)
        return self.judged("ours", alarms)

    def _alarm(self, path: Path, day: int) -> bool:
        """Whether the check at the end of a day is one."""
        ends = ((0, REFERENCE), (day + 1 - LEAD, day + 1), (day + 1 - 2 * LEAD, day + 1 - LEAD))
        times = [TimeWindow(start=EPOCH + a * DAY, end=EPOCH + b * DAY) for a, b in ends]
        windows = Windows(*(WindowColumns(path, self.time, window) for window in times))
        seen = compare_features(self.schema, windows, self.config.drift, self.units)
        return bool(seen.faults or seen.sudden or any(each.drifted for each in seen.features))

    def detectors(self, library: str) -> Iterator[Detector]:
        """Those of one library, each of all series or some of them, with a limit of its own."""
        version, found = json.loads((self.folder / f"{library}.json").read_text())
        for method in found[0]:
            tables: list[pd.DataFrame] = []
            for copy, own in zip(self.copies, found, strict=True):
                table = pd.DataFrame(own[method])
                if copy.kind:
                    same = tables[copy.stream][copy.start - FIRST :][:WATCHED]
                    table = same.reset_index(drop=True).assign(**table)
                tables.append(table)
            usual = pd.concat(tables[: self.num_choosing])
            # Series are not alike; levels of river are.
            centre, spread = usual.mean(), usual.std().clip(lower=1e-9)
            if library != "river":
                tables = [(table - centre) / spread for table in tables]
            for group in ("all", "score"):
                names = ["score"] if group == "score" else [*usual]
                numbers = [table[names].max(axis=1).to_numpy() for table in tables]
                limit = limit_at(numbers[: self.num_choosing])
                alarms = [each > limit for each in numbers]
                yield self.judged(f"{library} {version}, {method}, {group}", alarms)

    def judged(self, name: str, alarms: Sequence[Any]) -> Detector:
        """A detector by its alarms of each copy."""
        delays: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for copy, own in zip(self.copies, alarms, strict=True):
            if copy.kind:
                day = first_new(own, alarms[copy.stream][copy.start - FIRST :])
                delays[copy.kind].append(day or WATCHED + 1)
        rate = alarm_rate(alarms[self.num_choosing : 2 * self.num_choosing])
        return Detector(name, rate, [statistics.median(days) for days in delays.values()])


def first_new(alarms: Sequence[Any], usual: Sequence[Any]) -> int | None:
    """First day, from 1, with an alarm that the unchanged stream does not have; None: never."""
    both = enumerate(zip(alarms, usual, strict=False), 1)
    return next((day for day, (new, old) in both if new and not old), None)


def alarm_rate(streams: Sequence[Any]) -> float:
    """False alarms a day: streams with one over the days of all streams until the first."""
    firsts = [int(np.argmax(each)) + 1 if np.any(each) else len(each) for each in streams]
    return sum(bool(np.any(each)) for each in streams) / sum(firsts)


def limit_at(streams: Sequence[Any]) -> float:
    """Lowest limit with at most `MAX_RATE` false alarms a day."""
    tried = np.unique(np.concatenate(streams))
    return float(next(t for t in tried if alarm_rate([each > t for each in streams]) <= MAX_RATE))


def figures(bench: Bench) -> Measured:
    """False alarms and delays of our check, and of the best detector of another library."""
    found: Measured = []
    every = [bench.settings]
    if not bench.small:
        every.append(traffic_loop(bench.folder))
    for number, settings in enumerate(every):
        folder = bench.folder / f"streams-{number}"
        folder.mkdir()
        case = UseCase(settings, folder, bench.small)
        others: list[Detector] = []
        for name in LIBRARIES:
            if python := tool_python(name):
                command = [str(python), drift_libraries.__file__, name, str(folder)]
                subprocess.run(command, check=True, env=os.environ | QUIET)
                others += case.detectors(name)
            else:
                found.append(LeftOut(f"delay of {name}", f"there is no environment .venv-{name}"))
        found += compared(case.config.name, case.check(), others)
    return found


def compared(name: str, check: Detector, others: Sequence[Detector]) -> Measured:
    """False alarms, and the delay to that of the best other detector that keeps to the same bound.

    The best is known by the very streams that judge, which favours it. A check with too many false
    alarms is not compared: its delay is no figure, and misses the bound.
    """
    most, fair = 100 * MAX_JUDGED_RATE, [o for o in others if o.rate <= MAX_JUDGED_RATE]
    of = f"limits as shipped; {len(fair)} of {len(others)} other detectors keep to it"
    found: Measured = [at_most(f"{name}: false alarms in 100 days", 100 * check.rate, most, of)]
    if fair:
        best = min(fair, key=lambda each: each.mean)
        ratio = check.mean / best.mean if check.rate <= MAX_JUDGED_RATE else float("nan")
        days = f"{check}; {best}; {', '.join(KINDS)}"
        found.append(at_most(f"{name}: days until noticed, to the best", ratio, 1, days))
    return found
