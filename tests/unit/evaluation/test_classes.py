from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from torch import Tensor

from tasks.contracts.evaluation import MetricSet
from tasks.evaluation.drift.result import performance_change
from tasks.evaluation.judge import score_window
from tasks.evaluation.metrics import why_not_judged
from tasks.kernel.errors import DataContractError
from tasks.stats.ranked import METRICS, RankedClasses
from tests.support.data.builders import CLASSES, class_frame, month
from tests.support.evaluation.programs import QUICK, Case, LateRate


class ThreeWays(LateRate):
    """Probabilities of three classes by the columns that decide the label of `class_frame`."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        known = torch.nan_to_num(numeric) + categorical.float().sum(1, keepdim=True) * 0
        pull = self.slope * (known[:, 2] - 0.25) + (known[:, 1] - 840) / 400
        return torch.softmax(torch.stack([-pull - 1, 0.3 * pull, pull], 1), dim=1)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("classes")
    return Case.of(folder, class_frame(4000), CLASSES, ThreeWays(5.0), ThreeWays(-2.0))


@given(st.integers(0, 10_000), st.integers(3, 6), st.integers(30, 300))
def test_metrics_of_several_classes_agree_with_scikit_learn(
    seed: int, num_classes: int, num_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = np.arange(num_rows) % num_classes
    logits = rng.normal(size=(num_rows, num_classes)) + 1.5 * np.eye(num_classes)[labels]
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ours = dict(
        zip(
            METRICS,
            RankedClasses(labels, scores, np.zeros(num_rows, np.intp), 5).estimate(),
            strict=True,
        )
    )
    truth = np.eye(num_classes)[labels]
    macro = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert ours["auc"] == pytest.approx(macro)
    assert ours["pr_auc"] == pytest.approx(average_precision_score(truth, scores))
    assert ours["log_loss"] == pytest.approx(log_loss(labels, scores))
    assert ours["brier"] == pytest.approx(((scores - truth) ** 2).sum(axis=1).mean())
    promised = (scores * (1 - scores)).sum(axis=1).mean()
    assert ours["excess_brier"] == pytest.approx(ours["brier"] - promised)


def test_a_model_of_classes_is_judged_whole_by_class_by_slice_and_beside_others(case: Case) -> None:
    report = case.judged()
    overall = report.overall
    assert isinstance(overall, MetricSet)
    assert tuple(overall.by_class) == CLASSES.classes
    mean = np.mean([of.auc.value for of in overall.by_class.values()])
    assert overall.auc.low < overall.auc.value == pytest.approx(mean)
    assert overall.base_rate == max(of.base_rate for of in overall.by_class.values())
    assert {c.against: c.primary for c in report.comparisons}["champion:3"].low > 0
    assert len(report.slices) > 1
    assert report.roc[-1].y == report.calibration[-1].weight / report.calibration[-1].weight == 1


def test_a_champion_of_other_classes_is_refused_before_scores_are_compared(case: Case) -> None:
    other = CLASSES.model_copy(update={"classes": ("early", "late", "on time")})
    champion = case.champion.model_copy(update={"columns": other})
    with pytest.raises(DataContractError, match="tells apart early, late, on time"):
        replace(case, champion=champion).judged()


def test_a_window_that_lacks_a_class_is_scored_and_not_judged(case: Case) -> None:
    rows = class_frame(4000)
    rare = rows[CLASSES.label] == 0
    kept = rows[~rare | (rare.cumsum() <= 3)]
    reason = why_not_judged(kept, CLASSES, QUICK)
    assert reason == f"3 of {len(kept):,} rows are 'early', fewer than 20"
    odd = rows.assign(arrival=rows["arrival"] + 1)
    assert "are no number of a class" in str(why_not_judged(odd, CLASSES, QUICK))


def test_scores_of_two_windows_are_compared_by_class(case: Case) -> None:
    before, now = (
        score_window(case.champion, case.dataset, month(n), QUICK, case.store) for n in (10, 11)
    )
    assert performance_change(before, now) is not None
