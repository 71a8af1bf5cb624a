"""The history of a use case on a virtual clock: its rows, its days, and what any model scored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from datetime import time as clock_time
from functools import cache, cached_property
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import PositiveInt

from flows.config import PipelineConfig
from flows.replay.config import ReplayConfig
from tasks.contracts.base import Artifact, Contract, ModelVersionRef, TimeWindow
from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.hardware import class_of_run, read_classes
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.telemetry import ResourceUse
from tasks.evaluation import scoring
from tasks.evaluation.judge import judge_scored
from tasks.evaluation.metrics import baseline_columns
from tasks.evaluation.scoring import SCORE, Program, score_rows, utc_times
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder, code_digest, content_key

CHECKED_AT = clock_time(6, 30)
"""UTC; when the schedule of `prefect.yaml` checks drift."""
KEPT_SCORES = 32
"""Models whose scores are in memory at once."""


class ReplayModel(Contract):
    """A model in a replay: what scores rows, and what is compared with them."""

    number: int  # odd of a training, even of a recalibration
    made: datetime
    program: Artifact
    columns: DatasetSchema
    splits: DataSplits

    @property
    def is_trained(self) -> bool:
        """False of a recalibration."""
        return self.number % 2 == 1

    def version(self, history: History) -> ModelVersionRef:
        """Under the names that a registry would give it."""
        return ModelVersionRef(
            name=history.config.registry.model_name,
            version=self.number,
            run_id="replay",
            program_sha256=self.program.sha256,
            snapshot_sha256=history.dataset.snapshot.data.sha256,
        )

    def registered(self, history: History) -> RegisteredProgram:
        """As the registry would give it back."""
        return RegisteredProgram.model_validate(
            {"version": self.version(history), "program": self.program, "columns": self.columns}
        )


class KeptScores(Contract):
    """File with a model's scores, and what scoring took."""

    scores: Artifact
    num_rows: PositiveInt
    use: ResourceUse


@contextmanager
def measured() -> Iterator[list[ResourceUse]]:
    """What this process takes while the block lasts; the list holds it when it ends."""
    found: list[ResourceUse] = []
    began, cpu = time.monotonic(), time.process_time()
    yield found
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    found.append(ResourceUse(seconds=seconds, cpu_s=cpu_s))


@dataclass(frozen=True)
class History:
    """A use case's rows, and the clock on which they are walked.

    Args:
        config: the use case; its clock shows the virtual moment itself.
        dataset: validated rows of the whole history.
        settings: of this installation.
        with_unit: columns that are declared to have a unit.
        in_memory: scores by digest of the program, the newest few.
    """

    config: PipelineConfig
    dataset: ValidatedDataset
    settings: Settings
    with_unit: tuple[str, ...] = ()
    in_memory: dict[str, NDArray[np.float32]] = field(default_factory=dict, compare=False)

    @property
    def store(self) -> ArtifactStore:
        """Keeps what was computed: a replay that was cut off goes on."""
        return self.settings.store

    @property
    def columns(self) -> DatasetSchema:
        """Of the rows."""
        return self.dataset.snapshot.columns

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Row id, event time, label and baseline of all rows, in order of time."""
        c = self.columns
        names = [c.row_id, c.event_time, c.label, *baseline_columns(c)]
        path = self.store.path(self.dataset.snapshot.data)
        frame: pd.DataFrame = pq.read_table(path, columns=names).to_pandas()
        return frame

    @cached_property
    def times(self) -> NDArray[np.datetime64]:
        """Event times, UTC, rising."""
        return utc_times(self.rows, self.columns.event_time)

    def part(self, window: TimeWindow) -> slice:
        """The rows of a window."""
        first, last = np.searchsorted(
            self.times, [np.datetime64(m.replace(tzinfo=None)) for m in (window.start, window.end)]
        )
        return slice(int(first), int(last))

    def scores(self, model: ReplayModel) -> NDArray[np.float32]:
        """Scores of a model on all rows from its validation window on, NaN before.

        Returns:
            Shape (rows, 1), or (rows, classes) of several classes.
        """
        if model.program.sha256 not in self.in_memory:
            kept = keep_scores(self, model)
            names = list(self.columns.score_columns(SCORE))
            known = pq.read_table(self.store.path(kept.scores), columns=names).to_pandas()
            scores = np.full((len(self.rows), len(names)), np.nan, dtype=np.float32)
            scores[len(scores) - len(known) :] = known.to_numpy(np.float32)
            if len(self.in_memory) >= KEPT_SCORES:
                self.in_memory.pop(next(iter(self.in_memory)))
            self.in_memory[model.program.sha256] = scores
        return self.in_memory[model.program.sha256]

    def scored(self, model: ReplayModel, window: TimeWindow) -> pd.DataFrame:
        """Labelled rows of a window with a model's scores."""
        return self.with_scores(self.scores(model)[self.part(window)], window)

    def with_scores(self, scores: NDArray[np.float32], window: TimeWindow) -> pd.DataFrame:
        """Labelled rows of a window with some scores of its rows."""
        names = self.columns.score_columns(SCORE)
        rows = self.rows[self.part(window)].assign(**dict(zip(names, scores.T, strict=True)))
        return rows[rows[self.columns.label].notna()]

    def judged(self, model: ReplayModel, window: TimeWindow) -> ScoredWindow:
        """How good a model was in a window, as a drift check takes it."""
        rows, kept = self.scored(model, window), keep_scores(self, model)
        if not np.isfinite(rows[[*self.columns.score_columns(SCORE)]].to_numpy()).all():
            raise DataContractError(
                f"model {model.number} has no score for some rows of {window}; it scores those "
                f"from {self.scored_from(model):%Y-%m-%d} on. Make `clock.drift_days` shorter"
            )
        sha, config = model.program.sha256, self.config.evaluation
        return judge_scored(rows, sha, self.dataset, window, kept.scores, config)

    def scored_from(self, model: ReplayModel) -> datetime:
        """First moment whose rows a model scores: those of its first checks, and its references."""
        clock = self.config.clock
        reach = timedelta(days=clock.drift_days + 2, hours=clock.label_hours)
        return min(model.splits.validation.start, model.made - reach)

    def days(self, start: datetime, end: datetime) -> list[datetime]:
        """Moments of the daily checks from `start` on, before `end`."""
        first = datetime.combine(start.astimezone(UTC).date(), CHECKED_AT, UTC)
        num_days = (end - first) // timedelta(days=1) + 1
        moments = [first + timedelta(days=day) for day in range(num_days)]
        return [moment for moment in moments if start <= moment < end]

    def local(self, moment: datetime) -> datetime:
        """A moment in the use case's own time zone."""
        return moment.astimezone(ZoneInfo(self.config.clock.time_zone))

    @property
    def identity(self) -> Sequence[Any]:
        """What decides about everything that is computed of this history."""
        return (self.dataset.snapshot.data.sha256, self.config, self.with_unit)


@cache
def code_of(*modules: ModuleType) -> tuple[str, ...]:
    """Digests of what these modules of other packages do; what they decided is kept under them."""
    return tuple(code_digest(str(module.__file__)) for module in modules)


def opened(config: PipelineConfig, dataset: ValidatedDataset, units: tuple[str, ...]) -> History:
    """The history of a use case, on a clock that shows the virtual moment."""
    clock = config.clock.model_copy(update={"replay_year": None})
    config = config.model_copy(update={"clock": clock})
    return History(config, dataset, Settings.from_environment(), units)


def parts(history: History, replay: ReplayConfig) -> tuple[TimeWindow, TimeWindow]:
    """The days that bounds may be chosen on, and those that judge.

    Raises:
        WindowError: they do not follow on one another within the history, or nothing could be
            trained before the first.
    """
    config = history.config
    whole = TimeWindow(start=config.splits.train.start, end=config.window.end)
    length, clock = whole.end - whole.start, config.clock
    days = clock.min_train_days + clock.validation_days + clock.test_days + 2
    first = whole.start + timedelta(days=days, hours=clock.label_hours)
    zone = ZoneInfo(clock.time_zone)
    start = _moment(replay.start, zone) or max(first, whole.start + length / 4)
    middle = _moment(replay.held_out_from, zone)
    middle = middle or max(whole.start + length / 2, start + timedelta(days=28))
    if not first <= start < middle < whole.end:
        raise WindowError(
            f"a replay from {start:%Y-%m-%d} that judges from {middle:%Y-%m-%d} on does not fit "
            f"into the history of {config.name} ({whole}); expected a first day from "
            f"{first + timedelta(days=1):%Y-%m-%d} on, when a first model can be trained, and a "
            "later day that judges. Nothing was replayed"
        )
    bounds = [
        datetime.combine(moment.astimezone(zone).date(), clock_time.min, zone).astimezone(UTC)
        for moment in (start, middle)
    ]
    return (TimeWindow(start=bounds[0], end=bounds[1]), TimeWindow(start=bounds[1], end=whole.end))


def _moment(given: datetime | None, zone: ZoneInfo) -> datetime | None:
    """A moment that was asked for; one without a zone is of the use case's."""
    return given if given is None or given.tzinfo else given.replace(tzinfo=zone)


def keep_scores(history: History, model: ReplayModel) -> KeptScores:
    """Score the rows that a model may be asked about, once, and keep them in a file."""
    dataset, columns = history.dataset, history.columns
    key = content_key(
        code_of(scoring), model.program.sha256, model.columns, history.scored_from(model),
        dataset.snapshot.data.sha256,
    )  # fmt: skip

    def build(folder: StagedFolder) -> KeptScores:
        program = Program.open(model.program, model.columns, history.store)
        keep = (columns.row_id, columns.event_time, columns.label)
        window = TimeWindow(start=history.scored_from(model), end=history.config.window.end)
        with measured() as used:
            rows = score_rows(program, dataset, window, keep, history.store)
        rows.to_parquet(folder.path / "scores.parquet", index=False)
        return KeptScores(scores=folder.artifact("scores.parquet"), num_rows=len(rows), use=used[0])

    return history.store.build_once("replayed-scores", key, KeptScores, build)


def priced(use: ResourceUse) -> ResourceUse:
    """With energy and money by the price list; energy that no meter read is estimated."""
    prices = class_of_run(read_classes(), on_gpu=use.gpu_s > 0)[1]
    estimated = use.joules is None or use.estimated
    joules = use.joules or 0.0
    if estimated:
        joules = prices.watts_per_core * use.cpu_s + prices.watts_per_gpu * use.gpu_s
    money = {"amount": prices.money(use.cpu_s, use.gpu_s, joules), "currency": prices.currency}
    return use.model_copy(update={"joules": joules, "estimated": estimated, **money})
