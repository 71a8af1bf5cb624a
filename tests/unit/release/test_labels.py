"""Which rows and labels a release sees: as a real log writer wrote and people imported them."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flows.release import LoggedRequests
from serving.interfaces import Track
from serving.log.prediction_log import PredictionLog
from tasks.contracts.clock import ClockConfig
from tasks.contracts.rollout import Period, Shares
from tasks.kernel.errors import DataContractError
from tasks.predictions import labels
from tasks.predictions.labels import import_labels
from tasks.predictions.schema import labels_folder
from tasks.release.evidence import CANDIDATE, SHADOW, STABLE, Observed, observe
from tasks.release.records import Release
from tests.support.release.builders import SETTLE, release
from tests.support.serving.served_rows import MODEL, NOW, entity_batch, open_log, served

BEGUN = NOW + SETTLE
LATER = NOW + timedelta(days=2)
SECOND, MS = timedelta(seconds=1), timedelta(milliseconds=1)
RELEASE = release(
    opened_at=NOW, periods=(Period(step=0, since=NOW, shares=Shares(candidate=25, mirror=100)),)
)


class Town:
    """A log that is being written, and labels that are imported."""

    def __init__(self, home: Path, log: PredictionLog) -> None:
        self.home, self.log = home, log

    def ask(
        self, name: str, at: datetime, track: Track = "stable", version: str = "1", **keys: Any
    ) -> None:
        """One request of one row."""
        values = {key: [value] for key, value in keys.items()}
        self.log.served(entity_batch([name], values, at, served(version, track)))

    def ask_with_copy(self, name: str, at: datetime, **keys: Any) -> None:
        self.ask(name, at, **keys)
        self.ask(name, at + 5 * MS, "shadow", "2", **keys)

    def import_known(self, imported: datetime = NOW, **columns: Any) -> None:
        file = self.home / "labels.parquet"
        pd.DataFrame(columns).to_parquet(file, index=False)
        import_labels(self.home, MODEL, file, imported)

    def known(
        self, now: datetime = LATER, of: Release = RELEASE, clock: ClockConfig | None = None
    ) -> pd.DataFrame:
        self.log.stop()
        return LoggedRequests(self.home, clock or ClockConfig()).labels(of, now)

    def labels(self, now: datetime = LATER, **options: Any) -> dict[str, float]:
        known = self.known(now, **options)
        return dict(zip(known["request_id"], known["label"], strict=True))

    def observed(self, now: datetime = LATER) -> Observed:
        known = self.known(now)
        until = now - timedelta(seconds=RELEASE.config.settle_s)
        rows = LoggedRequests(self.home, ClockConfig()).rows(RELEASE, until)
        return observe(rows, RELEASE, known, until)


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with open_log(tmp_path) as log:
        yield Town(tmp_path, log)


def test_versions_of_several_classes_are_compared_by_the_true_ones_probability(town: Town) -> None:
    for version, track, at in (("1", "stable", BEGUN + SECOND), ("2", "shadow", BEGUN + SECOND)):
        scores = np.array([[0.1, 0.6, 0.3]] if version == "1" else [[0.2, 0.1, 0.7]], np.float32)
        town.log.served(entity_batch(["a"], {"flight": [1]}, at, served(version, track), scores))
    town.import_known(flight=[1], event_timestamp=[BEGUN], label=[1.0])
    seen = town.observed()
    true = {who: seen.labelled(who)[["label", "score"]].to_numpy() for who in (STABLE, SHADOW)}
    np.testing.assert_allclose(true[STABLE], [[1.0, 0.6]], rtol=1e-6)
    np.testing.assert_allclose(true[SHADOW], [[1.0, 0.1]], rtol=1e-6)
    # What no label tells is compared by the predicted class.
    assert seen.of(SHADOW)["score"].tolist() == pytest.approx([0.7])
    assert not seen.of(STABLE)["failed"].any()


def test_a_label_of_entities_counts_for_all_tracks_so_that_pairs_have_it(town: Town) -> None:
    town.ask_with_copy("a", BEGUN + SECOND, flight=1)
    town.ask_with_copy("b", BEGUN + SECOND, flight=2)
    town.ask("c", BEGUN + SECOND, "candidate", "2", flight=3)
    town.ask("d", BEGUN + SECOND, "stable", "7", flight=4)  # of neither version
    town.import_known(flight=[1, 3, 4], event_timestamp=[BEGUN] * 3, label=[1.0, 0.0, 1.0])
    seen = town.observed()
    assert seen.labels["label"].tolist() == [1.0, 0.0]
    assert [len(seen.labelled(who)) for who in (STABLE, SHADOW, CANDIDATE)] == [1, 1, 1]
    assert seen.labelled(STABLE)["label"].tolist() == seen.labelled(SHADOW)["label"].tolist()
    assert seen.labelled(CANDIDATE)["label"].tolist() == [0.0]


def test_a_copy_has_its_originals_label_where_another_is_nearer_to_the_copy(town: Town) -> None:
    town.ask_with_copy("a", BEGUN + SECOND, flight=1)
    moments = [BEGUN + SECOND - 10 * MS, BEGUN + SECOND + 12 * MS]
    town.import_known(flight=[1, 1], event_timestamp=moments, label=[1.0, 0.0])
    seen = town.observed()
    assert seen.labelled(STABLE)["label"].tolist() == [1.0]
    assert seen.labelled(SHADOW)["label"].tolist() == [1.0]


def test_what_a_later_look_knows_comes_behind_what_an_earlier_one_knew(town: Town) -> None:
    rng = np.random.default_rng(5)
    number = 120
    arrived = [BEGUN + timedelta(seconds=s) for s in rng.uniform(0, 100, number)]
    delays = rng.uniform(-90, 90, number)
    told = [at + timedelta(seconds=s) for at, s in zip(arrived, delays, strict=True)]
    for flight, at in enumerate(arrived):
        town.ask_with_copy(f"r{flight}", at, flight=flight)
    town.import_known(
        flight=range(number),
        event_timestamp=arrived,
        label=rng.integers(0, 2, number),
        known_at=told,
    )
    before: list[int] = []
    for seconds in range(20, 240, 20):
        seen = town.observed(BEGUN + timedelta(seconds=seconds)).labelled(STABLE)
        now = seen["request"].tolist()
        assert now[: len(before)] == before
        before = now
    assert len(before) == number


def test_labels_that_no_row_of_the_release_can_meet_are_not_held(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.ask_with_copy("a", BEGUN + SECOND, flight=1)
    town.ask_with_copy("b", BEGUN + SECOND, flight=2)
    past = [NOW - timedelta(days=d) for d in range(1, 51)]
    town.import_known(flight=[1] * 50, event_timestamp=past, label=[1.0] * 50)
    town.import_known(flight=[1], event_timestamp=[BEGUN], label=[1.0])
    town.import_known(request_id=["b", *(f"of-before-{n}" for n in range(50))], label=[0.0] * 51)
    monkeypatch.setattr(labels, "MAX_LABELS", 1)
    assert town.labels() == {"a": 1.0, "b": 0.0}
    town.import_known(flight=[2], event_timestamp=[BEGUN], label=[1.0])
    with pytest.raises(DataContractError, match="more than 1 labels for the rows in question"):
        town.labels()


def test_recorded_data_that_is_played_meets_labels_of_its_own_year(town: Town) -> None:
    town.ask_with_copy("a", BEGUN + SECOND, flight=1)
    town.import_known(flight=[1], event_timestamp=[BEGUN.replace(year=2013)], label=[1.0])
    assert town.labels() == {}
    assert town.labels(clock=ClockConfig(replay_year=2013)) == {"a": 1.0}


def test_without_labels_the_log_is_not_read(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the log was read")

    monkeypatch.setattr(labels, "read_rows", refuse)
    assert town.observed().labels.empty
    town.import_known(request_id=["a"], label=[0.0])
    assert town.known(NOW).empty  # nothing has settled yet


def test_a_damaged_table_of_labels_is_named(town: Town) -> None:
    town.ask_with_copy("a", BEGUN + SECOND, flight=1)
    folder = labels_folder(town.home, MODEL)
    folder.mkdir(parents=True)
    for name in ("request-1.parquet", "entity-1.parquet"):
        (folder / name).write_text("no parquet")
        with pytest.raises(DataContractError, match=f"{name} is damaged"):
            town.labels()
        (folder / name).unlink()


def test_a_damaged_segment_of_the_log_decides_nothing(town: Town) -> None:
    town.ask_with_copy("a", BEGUN + SECOND, flight=1)
    town.log.stop()
    segment = next((town.home / "predictions").rglob("part-*.parquet"))
    segment.write_bytes(segment.read_bytes()[:-9])
    with pytest.raises(DataContractError, match="Nothing was decided"):
        LoggedRequests(town.home, ClockConfig()).rows(RELEASE, LATER)
