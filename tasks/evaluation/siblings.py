"""A smaller network beside the one it came from, and beside its twin that had no teacher."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import StudentReport
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.training import CandidateModel, ShrunkModel, TrainedModel
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.measuring import (
    AnyMeasured,
    baseline_columns,
    difference,
    measure_rows,
    why_not_judged,
)
from tasks.evaluation.rows import SCORE
from tasks.evaluation.scoring import Program, score_rows
from tasks.kernel.errors import DataContractError
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
        config: bootstrap.
        store: holds programs and snapshot.

    Raises:
        DataContractError: the test rows cannot be judged, or a program does not give one score a
            row.
        ArtifactError: an artifact is absent or damaged.
    """
    scorer = _Scorer(student, dataset, config, store)
    ours, original = scorer.of(student), scorer.of(parent)
    with_teacher = None if taught is None else scorer.of(taught)
    alone = None if taught is None else scorer.of(untaught)
    report = StudentReport(
        window=student.splits.test,
        parent=original.metric_set(),
        student=ours.metric_set(),
        to_parent=difference(ours, original, "parent"),
        taught=with_teacher.metric_set() if with_teacher else None,
        untaught=alone.metric_set() if alone else None,
        teaching=difference(with_teacher, alone, "untaught twin")
        if with_teacher and alone
        else None,
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


class _Scorer:
    """Measures programs on the same rows."""

    def __init__(
        self,
        student: ShrunkModel,
        dataset: ValidatedDataset,
        config: EvaluationConfig,
        store: ArtifactStore,
    ) -> None:
        self._columns = student.columns
        self._window = student.splits.test
        self._dataset = dataset
        self._config = config
        self._store = store

    def of(self, model: CandidateModel | RegisteredProgram) -> AnyMeasured:
        """Quality of one model, with its replicates."""
        columns = self._columns  # whose label and baseline judge; a model takes its own
        takes = model.raw_columns if isinstance(model, RegisteredProgram) else model.columns
        names = (columns.row_id, columns.event_time, columns.label, *baseline_columns(columns))
        opened = Program.open(model.program, takes, self._store)
        rows = score_rows(
            opened, self._dataset, self._window, names, self._store, self._config.batch_rows
        )
        self._check(rows)
        return measure_rows(rows, columns, SCORE, self._config)

    def _check(self, rows: pd.DataFrame) -> None:
        bad = int(np.count_nonzero(rows[self._columns.label].isna()))
        reason = why_not_judged(rows, self._columns, self._config)
        if bad or reason is not None:
            raise DataContractError(
                f"test window {self._window} cannot be judged: "
                f"{reason or f'{bad:,} of {len(rows):,} rows have no label'}. Choose a longer "
                "test window, or lower the limits in the evaluation's configuration"
            )
