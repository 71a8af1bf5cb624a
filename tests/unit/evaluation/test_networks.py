import pytest
import torch
from torch import Tensor

from tasks.contracts.evaluation import Metric, StudentReport
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import judge_networks, who_won, why_refused
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import (
    compressed_model,
    compression,
    dataset,
    frame,
    metric_set,
    splits,
)
from tests.support.evaluation.programs import LateRate, stored_program, trained_model
from tests.support.registry.builders import comparison


class Blurred(LateRate):
    """Ranks nearly as `LateRate`: scores in steps."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return torch.round(super().forward(categorical, numeric) * 8) / 8


class Blind(LateRate):
    """Knows next to nothing."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return torch.sigmoid(torch.nan_to_num(numeric)[:, 3] * 0.01)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("siblings"))


def judged(store: ArtifactStore, student: LateRate) -> StudentReport:
    """A student beside `LateRate`, which it was pruned from."""
    rows = dataset(store, frame(6000))
    parent = stored_program(store, LateRate())
    made = trained_model(stored_program(store, student).program, rows)
    pruning = compression(parent.version, method="pruning", is_distilled=False)
    compressed = compressed_model(made, pruning)
    return judge_networks(compressed, parent, None, made, rows, EvaluationConfig(), store)


def test_a_student_as_good_as_its_parent_is_offered_with_the_paired_difference(
    store: ArtifactStore,
) -> None:
    report = judged(store, Blurred())
    assert report.window == splits().test
    assert report.refusal is None
    assert report.result is None
    change = report.to_parent.primary
    assert change.value == pytest.approx(report.student.primary.value - report.parent.primary.value)
    alone = report.parent.primary
    assert change.high - change.low < (alone.high - alone.low) / 2  # what both share cancels


def test_a_student_below_its_parents_interval_is_refused_with_both_numbers(
    store: ArtifactStore,
) -> None:
    report = judged(store, Blind())
    assert f"{report.student.primary.value:.4f}" in report.refusal
    assert f"[{report.parent.primary.low:.4f}, {report.parent.primary.high:.4f}]" in report.refusal
    assert "Nothing was registered" in report.refusal


def report(difference: Metric, value: float = 0.75) -> StudentReport:
    change = comparison("control run", 0.0).model_copy(update={"auc_difference": difference})
    return StudentReport(
        window=splits().test,
        parent=metric_set(0.75),
        student=metric_set(value),
        to_parent=change,
        distilled=metric_set(value),
        control=metric_set(value),
        gain=change,
        refusal=None,
    )


@pytest.mark.parametrize(
    ("low", "value", "high", "told"),
    [
        (0.001, 0.004, 0.007, "The teacher helped: distilled minus control is AUC +0.0040"),
        (-0.007, -0.004, -0.001, "The teacher did harm"),
        (-0.002, 0.001, 0.004, "Nobody can tell if it helped"),
        (1e-6, 2e-6, 3e-6, "The teacher made no difference"),
    ],
)
def test_who_won_is_said_by_the_whole_interval(
    low: float, value: float, high: float, told: str
) -> None:
    assert told in str(who_won(report(Metric(value=value, low=low, high=high))))


@pytest.mark.parametrize(
    ("value", "is_refused"), [(0.75, False), (0.7401, False), (0.7399, True), (float("nan"), True)]
)
def test_the_lower_end_of_the_parents_interval_is_the_bound_and_no_number_is_below_it(
    value: float, is_refused: bool
) -> None:
    found = report(Metric(value=0.0, low=-1.0, high=1.0), value)
    assert (why_refused(found) is not None) is is_refused
