from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from flows.config import read_pipeline_config
from flows.drift_check import columns_with_unit
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.drift import DriftReport, DriftResult
from tasks.evaluation.config import DriftConfig
from tasks.evaluation.drift.compare import compare_windows
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.windows import scored

TRAIN, VALIDATION, CURRENT = builders.month(1, 6), builders.month(7, 2), builders.month(11)
CONFIG = DriftConfig()
Change = Callable[[pd.DataFrame, pd.Series], None]


def changed(store: ArtifactStore, change: Change | None = None) -> ValidatedDataset:
    """A snapshot whose rows of the current window were changed in place."""
    data = builders.frame(20_000)
    if change is not None:
        change(data, data["event_timestamp"].between(CURRENT.start, CURRENT.end, inclusive="left"))
    return builders.dataset(store, data)


def check(
    store: ArtifactStore,
    dataset: ValidatedDataset,
    auc: float | None = 0.75,
    excess: float = 0.0,
    shift: float = 0.0,
    with_unit: tuple[str, ...] = ("temp",),
    current: ValidatedDataset | None = None,
    window: TimeWindow = CURRENT,
) -> DriftReport:
    current = current or dataset
    before = scored(store, dataset, VALIDATION)
    now = scored(store, current, window, auc, excess, shift)
    return compare_windows(dataset, TRAIN, current, window, before, now, CONFIG, store, with_unit)


def test_nothing_changed_is_stable(store: ArtifactStore) -> None:
    report = check(store, changed(store))
    assert report.result == DriftResult.STABLE
    assert not any(feature.drifted for feature in report.features)
    assert not report.prediction.drifted
    assert [f.feature for f in report.features] == [
        "distance", "minute_of_day", "late_rate_24h", "temp", "gust", "carrier", "origin", "dest"
    ]  # fmt: skip
    assert {f.kind for f in report.features} == {"numeric", "categorical"}
    assert report.performance_reference == VALIDATION
    assert report.effect_threshold == CONFIG.min_effect
    before = report.model_dump_json().replace('"result":', '"verdict":')
    assert DriftReport.model_validate_json(before) == report  # as stored before 2026-11-24
    assert check(store, changed(store)).model_dump_json() == report.model_dump_json()


def test_a_warmer_month_is_watched_and_named(store: ArtifactStore) -> None:
    def warmer(data: pd.DataFrame, now: pd.Series) -> None:
        data.loc[now, "temp"] += np.float32(15)

    report = check(store, changed(store, warmer))
    assert report.result == DriftResult.WATCH
    assert [f.feature for f in report.features if f.drifted] == ["temp"]
    assert any(
        "1 of 8 features drifted, effect surely above 0.1: temp 0." in e for e in report.evidence
    )
    assert any("performance holds" in e for e in report.evidence)


def test_predictions_that_moved_are_watched_with_labels_and_retrained_without(
    store: ArtifactStore,
) -> None:
    dataset = changed(store)
    assert check(store, dataset, shift=1.0).result == DriftResult.WATCH
    report = check(store, dataset, auc=None, shift=1.0)
    assert report.result == DriftResult.RETRAIN
    assert report.auc_change is None
    assert report.evidence[0] == "Performance is not known: no label is known."
    stale = check(store, dataset, auc=0.68, excess=0.03)
    assert stale.result == DriftResult.RETRAIN
    assert stale.auc_change.value == pytest.approx(-0.07)
    # A hard month, for any model.
    assert check(store, dataset, auc=0.68, excess=-0.03).result == DriftResult.WATCH


def to_celsius(data: pd.DataFrame, now: pd.Series) -> None:
    data.loc[now, "temp"] = (data.loc[now, "temp"] - np.float32(32)) * np.float32(5 / 9)


def freeze(data: pd.DataFrame, now: pd.Series) -> None:
    data.loc[now, "late_rate_24h"] = np.float32(0.21)


def lose(data: pd.DataFrame, now: pd.Series) -> None:
    data.loc[now, "distance"] = np.nan


def rename(data: pd.DataFrame, now: pd.Series) -> None:
    data.loc[now, "carrier"] = data.loc[now, "carrier"].str.lower()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (to_celsius, "temp: looks converted from Fahrenheit to Celsius"),
        (freeze, "late_rate_24h: one value in all"),
        (lose, "distance: missing in 100.0% of the "),
        (rename, "carrier: 100.0% of the "),
    ],
)
def test_a_broken_feed_is_a_fault_even_when_performance_fell(
    store: ArtifactStore, fault: Change, sentence: str
) -> None:
    report = check(store, changed(store, fault), auc=0.6, excess=0.1)
    assert report.result == DriftResult.DATA_FAULT
    assert report.evidence[0].startswith(f"Fault of the data: {sentence}")


def test_a_guess_of_a_unit_that_nobody_declared_is_told_and_stops_no_retraining(
    store: ArtifactStore,
) -> None:
    report = check(store, changed(store, to_celsius), auc=0.6, excess=0.1, with_unit=())
    assert report.result == DriftResult.RETRAIN
    assert report.evidence[-1].startswith("Look at temp: looks converted from Fahrenheit")


def test_the_days_before_are_found_in_either_snapshot(store: ArtifactStore) -> None:
    faulty = builders.frame(20_000)
    inside = faulty["event_timestamp"].between(CURRENT.start, CURRENT.end, inclusive="left")
    to_celsius(faulty, inside)
    current = builders.dataset(store, faulty[inside].reset_index(drop=True))
    assert check(store, changed(store), current=current).result == DriftResult.DATA_FAULT


def test_a_window_of_few_days_is_refused_with_the_reason(store: ArtifactStore) -> None:
    dataset = changed(store)
    three_days = CURRENT.model_copy(update={"end": CURRENT.start + pd.Timedelta(days=3)})
    with pytest.raises(WindowError, match="on 3 UTC days, expected at least 7 days"):
        check(store, dataset, window=three_days)


def test_scores_of_other_rows_or_another_model_are_refused(store: ArtifactStore) -> None:
    dataset = changed(store)
    before, now = scored(store, dataset, VALIDATION), scored(store, dataset, CURRENT)
    with pytest.raises(DataContractError, match="expected these rows, scored by the same model"):
        compare_windows(dataset, TRAIN, dataset, CURRENT, before, before, CONFIG, store)
    other = now.model_copy(update={"program_sha256": "b" * 64})
    with pytest.raises(DataContractError, match="scored by the same model"):
        compare_windows(dataset, TRAIN, dataset, CURRENT, before, other, CONFIG, store)


def test_columns_with_a_unit_are_those_of_the_suites_as_the_training_set_calls_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo = PROJECT_ROOT / "feature_repo" / "flights"
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(repo))
    with_unit = columns_with_unit(read_pipeline_config(repo))
    assert {"distance", "weather__temp", "weather__visib"} <= set(with_unit)
    assert not any("landed" in name for name in with_unit)
