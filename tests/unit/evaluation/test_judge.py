from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import score_window
from tasks.evaluation.metrics import check_test_window
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.programs import QUICK, Case


def test_a_stranger_recomputes_the_report_from_the_predictions(case: Case) -> None:
    report = case.judged()
    rows = pd.read_parquet(case.store.path(report.predictions))
    assert rows.columns.tolist() == [
        "flight_id", "event_timestamp", "is_late", "score", "yardstick_score", "champion_score"
    ]  # fmt: skip
    labels = rows["is_late"]
    assert report.overall.num_rows == len(rows)
    assert report.overall.base_rate == pytest.approx(labels.mean())
    assert report.overall.auc.value == pytest.approx(roc_auc_score(labels, rows["score"]))
    assert report.overall.pr_auc.value == pytest.approx(
        average_precision_score(labels, rows["score"])
    )
    assert report.overall.brier.value == pytest.approx(
        brier_score_loss(labels, rows["score"].astype(float))
    )
    baseline_model, champion = (
        roc_auc_score(labels, rows[name]) for name in ("yardstick_score", "champion_score")
    )
    assert report.baseline_model.auc.value == pytest.approx(baseline_model)
    differences = {c.against: c.auc_difference.value for c in report.comparisons}
    assert differences == pytest.approx(
        {
            "yardstick": report.overall.auc.value - baseline_model,
            "champion:3": report.overall.auc.value - champion,
        }
    )


def test_equal_inputs_give_the_same_report_to_the_byte(case: Case) -> None:
    first = case.judged()
    path = case.store.path(first.predictions)
    path.unlink()  # as if the disk had lost it: the judgement is made again
    assert case.judged().model_dump_json() == first.model_dump_json()


@pytest.mark.parametrize("what", ["model", "baseline model", "windows"])
def test_a_model_of_another_snapshot_or_windows_is_refused(case: Case, what: str) -> None:
    other = {"snapshot_sha256": "f" * 64}
    if what == "windows":
        test = builders.month(5)
        other = {"splits": case.baseline_model.splits.model_copy(update={"test": test})}
    part = "candidate" if what == "model" else "baseline_model"
    changed = replace(case, **{part: getattr(case, part).model_copy(update=other)})
    with pytest.raises(DataContractError, match="expected the same snapshot and splits"):
        changed.judged()


def test_a_test_window_that_is_too_small_is_refused_with_the_reason(case: Case) -> None:
    strict = QUICK.model_copy(update={"min_slice_positives": 10**6})
    with pytest.raises(
        DataContractError, match=r"too small to judge: \d+ positives in 1,\d\d\d rows"
    ):
        case.judged(strict)


def test_a_champion_whose_input_is_gone_is_named_with_what_to_do(case: Case) -> None:
    needed = case.champion.raw_columns
    more = needed.model_copy(update={"numeric": (*needed.numeric, "hint")})
    rival = case.champion.model_copy(update={"columns": more})
    with pytest.raises(DataContractError, match=r"needs hint, which .* withdraw \S+ \d+ "):
        replace(case, champion=rival).judged()


def test_a_scored_window_holds_every_row_and_its_quality(case: Case) -> None:
    scored = score_window(case.champion, case.dataset, builders.month(7, 2), QUICK, case.store)
    rows = pd.read_parquet(case.store.path(scored.scores))
    assert rows.columns.tolist() == ["flight_id", "event_timestamp", "is_late", "score"]
    assert len(rows) == scored.num_rows
    assert scored.metrics.auc.value == pytest.approx(roc_auc_score(rows["is_late"], rows["score"]))
    promised = (rows["score"] * (1 - rows["score"])).mean()
    assert scored.excess_brier.value == pytest.approx(
        scored.metrics.brier.value - promised, abs=1e-6
    )


def test_rows_without_labels_are_scored_but_not_judged(case: Case) -> None:
    data = builders.frame()
    data["is_late"] = data["is_late"].astype("Int8")
    data.loc[data["event_timestamp"].dt.month == 12, "is_late"] = None
    dataset = builders.dataset(case.store, data)
    december = score_window(case.champion, dataset, builders.month(12), QUICK, case.store)
    assert december.metrics is None
    assert december.excess_brier is None
    assert december.unjudged == "no label is known"
    both = score_window(case.champion, dataset, builders.month(11, 2), QUICK, case.store)
    assert both.num_rows - both.metrics.num_rows == december.num_rows
    assert np.isfinite(pd.read_parquet(case.store.path(both.scores))["score"]).all()


def test_a_test_window_that_will_not_be_judged_is_told_before_training(tmp_path: Path) -> None:
    store, window = ArtifactStore(tmp_path), builders.splits().test
    enough, few = (builders.dataset(store, builders.frame(rows)) for rows in (4000, 102))
    check_test_window(enough, window, EvaluationConfig(), store)
    with pytest.raises(DataContractError, match="too small to judge"):
        check_test_window(few, window, EvaluationConfig(), store)
    with pytest.raises(ConfigurationError, match="slices name colour"):
        check_test_window(enough, window, EvaluationConfig(slices=("colour",)), store)
