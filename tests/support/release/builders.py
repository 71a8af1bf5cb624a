"""Small releases: a log of two versions, and server, gateway and registry as a release has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.contracts.release import GateResult, PromotionDecision
from tasks.contracts.rollout import Evidence, Finding, Period, Shares
from tasks.kernel.errors import RegistryError
from tasks.predictions.schema import FIXED
from tasks.release.config import ReleaseConfig, StepConfig
from tasks.release.evidence import COLUMNS, no_labels
from tasks.release.records import OPEN, Release
from tasks.release.traffic import TracksRefusedError
from tests.support.data.builders import version_ref

MODEL = "flight-delay"
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SETTLE = timedelta(seconds=30)
STEPS = (
    StepConfig(name="shadow", candidate_percent=0, mirror_percent=100, min_minutes=1),
    StepConfig(name="quarter", candidate_percent=25, min_minutes=1),
    StepConfig(name="all", candidate_percent=100, min_minutes=1),
)
CONFIG = ReleaseConfig(steps=STEPS, sticky=False)
WORSE = "AUC minus that of version 2 is -0.01 <b>"


def release(
    config: ReleaseConfig = CONFIG, step: int = 0, *, can_split: bool = True, **changes: Any
) -> Release:
    """An open release that is in a step since `START`."""
    at = (config.steps if can_split else config.steps[-1:])[step]
    shares = Shares(candidate=at.candidate_percent, mirror=at.mirror_percent, sticky=config.sticky)
    known = Release(
        release_id="0" * 32,
        model=MODEL,
        stable="1",
        candidate="2",
        state=OPEN,
        step=step,
        step_since=START,
        opened_at=START,
        opened_by="a test",
        generation=1,
        moved=1,
        can_split=can_split,
        config=config,
        periods=(Period(step=step, since=START, shares=shares, split=can_split),),
    )
    return known.model_copy(update=changes)


def finding(metric: str = "errors", *, harm: bool = False, high: float | None = 1.0) -> Finding:
    return Finding.model_validate(
        {
            "metric": metric,
            "alpha": 0.01,
            "log_evidence": 9.0 if harm else 0.0,
            "estimate": 1.0,
            "low": 0.5,
            "high": high,
            "num": 10,
            "unit": "times",
            "is_harm": harm,
            "sentence": f"{metric} were seen",
        }
    )


def evidence(*findings: Finding, **changes: Any) -> Evidence:
    known = Evidence(
        seen_until=START + timedelta(hours=1),
        findings=findings,
        step_requests=10_000,
        num_labels=10_000,
    )
    return known.model_copy(update=changes)


@dataclass
class Rows:
    """Rows of the prediction log, written as the server writes them."""

    seed: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        number: int,
        *,
        track: str = "stable",
        version: str = "1",
        error: float = 0.0,
        word: str = "backend",
        score: Callable[[np.random.Generator, int], Any] | None = None,
        latency_us: float = 2000.0,
        start: datetime = START + SETTLE,
        ids: str = "r",
        subjects: int = 0,
        names: str = "",
        apart_s: float = 0.1,
        batch_rows: int = 1,
    ) -> Rows:
        """Requests of one track, a tenth of a second apart if not told."""
        rng = np.random.default_rng([self.seed, len(self.rows), number])
        failed = rng.random(number) < error
        scores = rng.random(number) if score is None else score(rng, number)
        times = latency_us * rng.lognormal(0, 0.3, number)
        for i in range(number):
            self.rows.append(
                {
                    "request_id": f"{ids}{i}",
                    "request_row": 0,
                    "event_timestamp": start + timedelta(seconds=i * apart_s),
                    "version": version,
                    "slot": track,
                    "subject": f"{names or track}{rng.integers(subjects)}" if subjects else "",
                    "score": None if failed[i] else float(scores[i]),
                    "scores": None,
                    "error": word if failed[i] else None,
                    "latency_us": int(times[i]),
                    "compute_us": int(times[i] / 2 * batch_rows),
                    "batch_rows": batch_rows,
                }
            )
        return self

    @property
    def table(self) -> pa.Table:
        """As the log is read."""
        return pa.Table.from_pylist(self.rows, schema=SCHEMA)

    def write(self, home: Path, name: str = "part-0") -> None:
        """One segment a day."""
        frame = pd.DataFrame(self.rows)
        for day, rows in frame.groupby(frame["event_timestamp"].dt.date):
            folder = home / "predictions" / f"model={MODEL}" / f"day={day}"
            folder.mkdir(parents=True, exist_ok=True)
            table = pa.Table.from_pandas(rows, schema=SCHEMA, preserve_index=False)
            pq.write_table(table, folder / f"{name}.parquet")


SCHEMA = pa.schema([FIXED.field(name) for name in COLUMNS])


@dataclass
class FakeTraffic:
    """Keeps what was set last; `killed_at` ends the process at that call."""

    can_split: bool = True
    at: dict[str, str | None] = field(
        default_factory=lambda: {"stable": "1", "candidate": None, "shadow": None}
    )
    shared: Shares = field(default_factory=Shares)
    calls: list[str] = field(default_factory=list)
    killed_at: int | None = None
    broken: str | None = None
    """A version that cannot be loaded."""

    def tracks(self, model: str) -> Mapping[str, str | None]:
        return dict(self.at)

    def all_tracks(self, model: str) -> Sequence[Mapping[str, str | None]]:
        return [self.tracks(model)]

    def set_tracks(self, model: str, tracks: Mapping[str, str | None]) -> None:
        at = self.at | dict(tracks)
        self._count(f"tracks {at['stable']}/{at['candidate']}/{at['shadow']}")
        if self.broken and self.broken in tracks.values():
            raise TracksRefusedError(f"version {self.broken} cannot be loaded")
        self.at = at

    def shares(self, model: str) -> Shares:
        return self.shared

    def set_shares(self, model: str, shares: Shares) -> None:
        self._count(f"shares {shares.candidate:g}/{shares.mirror:g}")
        assert not shares.candidate or self.at["candidate"], "requests would go to an empty track"
        assert not shares.mirror or self.at["shadow"]
        self.shared = shares

    def _count(self, call: str) -> None:
        if self.killed_at == len(self.calls):
            raise KeyboardInterrupt(call)
        self.calls.append(call)


@dataclass(frozen=True)
class FakeLog:
    """What was logged and is known of a release's requests."""

    logged: Rows = field(default_factory=Rows)
    known: pd.DataFrame = field(default_factory=no_labels)

    def rows(self, release: Release, until: datetime) -> pa.Table:
        return self.logged.table

    def labels(self, release: Release, now: datetime) -> pd.DataFrame:
        return self.known


@dataclass
class FakeChampions:
    """The alias, and the champion before."""

    now: str | None = "2"
    before: str = "1"
    refuses: bool = False
    taken_back: list[str] = field(default_factory=list)
    restored: bool = False

    def was_restored(self, model: str) -> bool:
        return self.restored

    def champion(self, model: str) -> str | None:
        return self.now

    def take_back(self, release: Release, reason: str) -> str:
        if self.refuses:
            raise RegistryError("version 1 lost its files. The alias was not moved")
        self.now, self.restored = self.before, True
        self.taken_back.append(reason)
        return self.before


@dataclass
class FakeGateway:
    """Keeps the shares that it was given, from 0 to 1."""

    given: list[Shares] = field(default_factory=lambda: [Shares(sticky=True)])

    def set_shares(self, model: str, *, candidate: float, mirror: float, sticky: bool) -> None:
        self.given.append(Shares(candidate=candidate, mirror=mirror, sticky=sticky))

    def shares(self, model: str) -> Shares:
        return self.given[-1]


def refused() -> PromotionDecision:
    gates = (
        GateResult(name="auc-floor", passed=True, evidence="AUC 0.75"),
        GateResult(name="champion", passed=False, evidence=WORSE),
    )
    return PromotionDecision(
        candidate=version_ref(name="delay"), previous_champion=2, gates=gates, promoted=False
    )
