from __future__ import annotations

from tasks.evaluation.judge import judge_model
from tasks.evaluation.task import judgement, metric_rows, slice_rows
from tests.support.evaluation.programs import QUICK, Case


def test_what_the_artifacts_say_comes_from_the_report(case: Case) -> None:
    config = QUICK.model_copy(update={"min_slice_rows": 330})
    report = judge_model(
        case.candidate, case.dataset, case.champion, case.baseline_model, config, case.store
    )
    text = judgement(report)
    assert f"**AUC {report.overall.auc.value:.4f} [{report.overall.auc.low:.4f}, " in text
    assert "- minus champion:3: AUC +" in text
    assert [row["metric"] for row in metric_rows(report)] == [
        "auc", "pr auc", "brier", "log loss", "calibration error"
    ]  # fmt: skip
    rows = slice_rows(report)
    assert len(rows) == len(report.slices) + len(report.skipped_slices)
    assert rows[-1]["AUC"] == "not judged"
