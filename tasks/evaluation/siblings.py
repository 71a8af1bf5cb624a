"""A smaller network beside the one it came from, and beside its twin that had no teacher."""

from __future__ import annotations

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import StudentReport
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.training import CandidateModel, ShrunkModel, TrainedModel
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.metrics import Measured, baseline_columns, check_judgeable, measure_rows
from tasks.evaluation.rows import SCORE
from tasks.evaluation.scoring import Program, score_rows
from tasks.kernel.settings import ArtifactStore

SMALLEST_TOLD = 1e-4
"""Differences below this matter to nobody, however surely they are measured."""


def judge_siblings(
    student: ShrunkModel,
    parent: RegisteredProgram,
    taught: TrainedModel | None,
    untaught: TrainedModel,
    dataset: ValidatedDataset,
    config: EvaluationConfig,
    store: ArtifactStore,
) -> StudentReport:
    """Judge all of them on the student's test rows, with the same bootstrap draws.

    Args:
        student: the network that is offered.
        parent: the version it came from.
        taught: the network that learnt from the parent; None where none did.
        untaught: its twin, from labels alone.
        dataset: the snapshot that they were trained on.
        config: the fewest rows.
        store: holds programs and snapshot.

    Raises:
        DataContractError: the test rows cannot be judged, or a program does not give one score a
            row.
        ArtifactError: an artifact is absent or damaged.
    """
    columns, window = student.columns, student.splits.test  # a model takes columns of its own
    names = (columns.row_id, columns.event_time, columns.label, *baseline_columns(columns))

    def measured(model: CandidateModel | RegisteredProgram) -> Measured:
        takes = model.raw_columns if isinstance(model, RegisteredProgram) else model.columns
        opened = Program.open(model.program, takes, store)
        rows = score_rows(opened, dataset, window, names, store)
        check_judgeable(rows, columns, window, config)
        return measure_rows(rows, columns, SCORE)

    ours, original = measured(student), measured(parent)
    with_teacher = None if taught is None else measured(taught)
    alone = None if taught is None else measured(untaught)
    report = StudentReport(
        window=student.splits.test,
        parent=original.metric_set(),
        student=ours.metric_set(),
        to_parent=ours.minus(original, "parent"),
        taught=with_teacher.metric_set() if with_teacher else None,
        untaught=alone.metric_set() if alone else None,
        teaching=with_teacher.minus(alone, "untaught twin") if with_teacher and alone else None,
        refusal=None,
    )
    return report.model_copy(update={"verdict": who_won(report), "refusal": why_refused(report)})


def why_refused(report: StudentReport) -> str | None:
    """Why a smaller network is not good enough to be offered, in words; None where it is.

    Its quality must not lie below the 95 % interval of the network that it came from.
    """
    parent, student = report.parent.primary, report.student.primary
    if student.value >= parent.low:  # False of NaN
        return None
    name = report.parent.primary_name
    return (
        f"on {report.parent.num_rows:,} rows of {report.window} the smaller network has {name} "
        f"{student.value:.4f}, below the interval of the one that it came from, {parent.value:.4f} "
        f"[{parent.low:.4f}, {parent.high:.4f}]; expected at least its lower end. Nothing was "
        "registered; take out less, train longer, or let the student be larger"
    )


def who_won(report: StudentReport) -> str | None:
    """Whether a teacher helped, in words; None where there was none."""
    if report.teaching is None:
        return None
    change, name = report.teaching.primary, report.parent.primary_name
    shown = f"{name} {change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"
    rows = f"{report.parent.num_rows:,} test rows"
    if abs(change.value) < SMALLEST_TOLD:
        return f"The teacher made no difference: taught minus untaught is {shown} on {rows}."
    if change.low > 0:
        return f"The teacher helped: taught minus untaught is {shown} on {rows}."
    if change.high < 0:
        return f"The teacher did harm: taught minus untaught is {shown} on {rows}."
    return f"Whether the teacher helped, {rows} cannot tell: taught minus untaught is {shown}."
