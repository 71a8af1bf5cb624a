"""Judgement of a trained model on its test window, and scores of a registered one on any window.

A smaller network beside the one it came from, and beside a control run without a teacher.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from tasks.contracts import evaluation
from tasks.contracts.base import Artifact, TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.drift import ServedWindow
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.training import CandidateModel, CompressedModel, TrainedModel
from tasks.evaluation import metrics
from tasks.evaluation.baseline_model import read_scores
from tasks.evaluation.config import MONTH, EvaluationConfig
from tasks.evaluation.scoring import BASELINE_MODEL_SCORE, SCORE, Program, score_rows, slice_columns
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.stats.ranked import RankedClasses, RankedRows

MISSING = "(missing)"
SLICE_TOLERANCE = 0.1
"""RMSE on a slice of a regression that does no harm, in standard deviations of the label."""
MAX_LISTED = 20
PLAIN = "plain_score"


def judge_slices(
    rows: pd.DataFrame, columns: DatasetSchema, config: EvaluationConfig
) -> tuple[tuple[evaluation.SliceMetrics, ...], tuple[str, ...]]:
    """Metrics of each slice, largest first within a column, and the slices too small to judge.

    Args:
        rows: label, event time, `score`, `yardstick_score` of a regression, the baseline if any,
            and the slice columns.
        columns: names of the label and event time.
        config: slices and limits.
    """
    judged: list[evaluation.SliceMetrics] = []
    skipped: list[str] = []
    tolerance = SLICE_TOLERANCE * float(rows[columns.label].std(ddof=0))
    for name in config.slices:
        small = []
        for value, part in _parts(rows, columns, name):
            reason = metrics.why_not_judged(part, columns, config)
            if reason is not None:
                small.append((f"{name}={value}: {reason}", len(part)))
                continue
            measured, ratio = metrics.measure_rows(part, columns, SCORE), None
            if columns.task == "regression":
                plain = [metrics.measure_rows(p, columns, PLAIN) for p in _plain(part, columns)]
                ratio = metrics.error_ratio(measured, plain, tolerance)
            judged.append(
                evaluation.SliceMetrics(
                    column=name, value=value, metrics=measured.metric_set(), error_ratio=ratio
                )
            )
        skipped += _listed(name, small)
    return tuple(judged), tuple(skipped)


def _plain(part: pd.DataFrame, columns: DatasetSchema) -> Iterator[pd.DataFrame]:
    """The rows with each plain prediction; where the baseline is unknown, the baseline model's."""
    yield part.assign(**{PLAIN: part[BASELINE_MODEL_SCORE]})
    if columns.baseline is not None:
        yield part.assign(**{PLAIN: part[columns.baseline].fillna(part[BASELINE_MODEL_SCORE])})


def _parts(
    rows: pd.DataFrame, columns: DatasetSchema, name: str
) -> Iterator[tuple[str, pd.DataFrame]]:
    if name == MONTH:
        values = rows[columns.event_time].dt.tz_convert("UTC").dt.strftime("%Y-%m")
        sizes = values.value_counts().sort_index()
    else:
        values = rows[name].astype(object).where(rows[name].notna(), MISSING).astype(str)
        sizes = values.value_counts()
        sizes = sizes[sorted(sizes.index, key=lambda value: (-sizes[value], value))]
    groups = rows.groupby(values.to_numpy(), sort=False)
    for value in sizes.index:
        yield str(value), groups.get_group(value)


def _listed(name: str, small: list[tuple[str, int]]) -> list[str]:
    texts = [text for text, _ in small[:MAX_LISTED]]
    rest = small[MAX_LISTED:]
    if rest:
        texts.append(f"{name}: {len(rest):,} more values, {sum(n for _, n in rest):,} rows")
    return texts


logger = logging.getLogger(__name__)

CHAMPION_SCORE = "champion_score"


def judge_model(
    trained: CandidateModel,
    dataset: ValidatedDataset,
    incumbent: RegisteredProgram | None,
    baseline_model: evaluation.BaselineModel,
    config: EvaluationConfig,
    store: ArtifactStore,
) -> evaluation.EvaluationReport:
    """Judge a trained model on its test window, against the baseline model and the champion.

    Args:
        trained: the candidate.
        dataset: the snapshot it was trained from.
        incumbent: the champion's program, scored on the same rows; None where there is none.
        baseline_model: scores of the same test rows.
        config: intervals, slices, curves.
        store: holds programs, snapshot and scores, and takes the predictions.

    Raises:
        DataContractError: the parts do not belong together, the test window is empty or too small
            to judge, a label is null, or a program does not give one probability a row.
        ConfigurationError: a slice names no column.
        ArtifactError: an artifact is absent or damaged.
        StorageError: the disk refused a write.
    """
    snapshot = dataset.snapshot.data.sha256
    seen = {trained.snapshot_sha256, baseline_model.snapshot_sha256}
    if seen != {snapshot} or baseline_model.splits != trained.splits:
        raise DataContractError(
            f"the rows to judge on are of snapshot {snapshot[:12]} and {trained.splits.test}, the "
            f"model and the baseline model of {', '.join(sorted(s[:12] for s in seen))} and "
            f"{baseline_model.splits.test}; expected the same snapshot and splits. Nothing was "
            "judged"
        )
    key = content_key(
        "evaluation",
        code_digest(__file__),
        trained.program.sha256,
        trained.columns,
        trained.splits,
        dataset.snapshot.data.sha256,
        incumbent,
        baseline_model,
        config,
    )

    def build(folder: StagedFolder) -> evaluation.EvaluationReport:
        asked = _Asked(trained, dataset, incumbent, baseline_model, config)
        rows, columns = _scored_test_rows(asked, store), dataset.snapshot.columns
        models = (SCORE, BASELINE_MODEL_SCORE, CHAMPION_SCORE)
        names = [*metrics.judged_columns(columns)]
        names[3:3] = [column for model in models for column in columns.score_columns(model)]
        rows[names].to_parquet(folder.path / "predictions.parquet", index=False)
        return _report(asked, rows, folder.artifact("predictions.parquet"))

    return store.build_once("evaluations", key, evaluation.EvaluationReport, build)


class _Asked(NamedTuple):
    """What `judge_model` is given."""

    trained: CandidateModel
    dataset: ValidatedDataset
    incumbent: RegisteredProgram | None
    baseline_model: evaluation.BaselineModel
    config: EvaluationConfig


def score_window(
    model: RegisteredProgram,
    dataset: ValidatedDataset,
    window: TimeWindow,
    config: EvaluationConfig,
    store: ArtifactStore,
) -> evaluation.ScoredWindow:
    """Score all rows of a window, and judge those whose label is known.

    Raises:
        DataContractError: no row in the window, a column is absent, or the program does not give
            one probability a row.
        ArtifactError: an artifact is absent or damaged.
        StorageError: the disk refused a write.
    """
    snapshot = dataset.snapshot
    key = content_key(
        "scores", code_digest(__file__), model.program.sha256, model.raw_columns,
        snapshot.data.sha256, window, config,
    )  # fmt: skip

    def build(folder: StagedFolder) -> evaluation.ScoredWindow:
        columns = snapshot.columns
        program = Program.open(model.program, model.raw_columns, store)
        rows = score_rows(program, dataset, window, metrics.judged_columns(columns), store)
        rows.to_parquet(folder.path / "scores.parquet", index=False)
        scores = folder.artifact("scores.parquet")
        return judge_scored(rows, model.program.sha256, dataset, window, scores, config)

    return store.build_once("scores", key, evaluation.ScoredWindow, build)


def _scored_test_rows(asked: _Asked, store: ArtifactStore) -> pd.DataFrame:
    """Test rows with the scores of all models; `champion_score` is null where there is none."""
    trained, dataset, incumbent, baseline_model, config = asked
    columns, window = dataset.snapshot.columns, trained.splits.test
    keep = (*metrics.judged_columns(columns), *slice_columns(columns, config))
    candidate = Program.open(trained.program, trained.columns, store)
    rows = score_rows(candidate, dataset, window, keep, store)
    metrics.check_judgeable(rows, columns, window, config)
    reference = read_scores(baseline_model, store)
    if not np.array_equal(rows[columns.row_id].to_numpy(), reference[columns.row_id].to_numpy()):
        raise DataContractError(
            f"the baseline model scored {len(reference):,} rows, the model {len(rows):,}, and their"
            " ids are not the same; fit the former again on this snapshot. Nothing was judged"
        )
    for name in columns.score_columns(BASELINE_MODEL_SCORE):
        rows[name] = reference[name]
    champions = columns.score_columns(CHAMPION_SCORE)
    rows[[*champions]] = np.full((len(rows), len(champions)), np.nan, dtype=np.float32)
    if incumbent is not None:
        _check_has_inputs(incumbent, columns)
        champion = Program.open(incumbent.program, incumbent.raw_columns, store)
        scored = score_rows(champion, dataset, window, (columns.row_id,), store)
        for name, own in zip(champions, columns.score_columns(SCORE), strict=True):
            rows[name] = scored[own]
    return rows


def _check_has_inputs(incumbent: RegisteredProgram, columns: DatasetSchema) -> None:
    needed, model = incumbent.raw_columns, incumbent.version
    held = {*columns.categorical, *columns.numeric}
    if needed.classes != columns.classes:
        raise DataContractError(
            f"the champion, version {model.version} of {model.name}, tells apart "
            f"{', '.join(needed.classes) or '0 and 1'}, the training set has "
            f"{', '.join(columns.classes) or '0 and 1'}, so the two cannot be compared. Register "
            "under another name (registry.model_name), or take the champion back: "
            f"falaj models withdraw {model.name} {model.version} --reason WHY --approver NAME. "
            "Nothing was judged"
        )
    if lost := [c for c in (*needed.categorical, *needed.numeric) if c not in held]:
        raise DataContractError(
            f"the champion, version {model.version} of {model.name}, needs {', '.join(lost)}, "
            "which the training set no longer has, so the two cannot be compared on the same rows. "
            "Keep what it needs until another model serves, or take the champion back: "
            f"falaj models withdraw {model.name} {model.version} --reason WHY --approver NAME. "
            "Nothing was judged"
        )


def _report(
    asked: _Asked, rows: pd.DataFrame, predictions: Artifact
) -> evaluation.EvaluationReport:
    trained, dataset, incumbent, baseline_model, config = asked
    columns = dataset.snapshot.columns
    candidate = metrics.measure_rows(rows, columns, SCORE)
    reference = metrics.measure_rows(rows, columns, BASELINE_MODEL_SCORE)
    comparisons = [candidate.minus(reference, "yardstick")]
    if incumbent is not None:
        champion = metrics.measure_rows(rows, columns, CHAMPION_SCORE)
        comparisons.append(candidate.minus(champion, f"champion:{incumbent.version.version}"))
    slices, skipped = judge_slices(rows, columns, config)
    overall = candidate.metric_set(each=True)
    logger.info("judged %d rows: %s %.4f", len(rows), overall.primary_name, overall.primary.value)
    return evaluation.EvaluationReport.model_validate(
        {
            "model_sha256": trained.program.sha256,
            "snapshot_sha256": dataset.snapshot.data.sha256,
            "window": trained.splits.test,
            "overall": overall,
            "slices": slices,
            "skipped_slices": skipped,
            "baseline_model": reference.metric_set(each=True),
            "baseline_model_name": baseline_model.name,
            "baseline": _baseline(rows, columns, config),
            "baseline_name": columns.baseline,
            "comparisons": tuple(comparisons),
            "predictions": predictions,
            **_curves(candidate),
        }
    )


def _baseline(
    rows: pd.DataFrame, columns: DatasetSchema, config: EvaluationConfig
) -> evaluation.Quality | None:
    """The baseline judged as if it were a model, on the rows where it is known."""
    if columns.baseline is None:
        return None
    known = rows[rows[columns.baseline].notna()]
    if metrics.why_not_judged(known, columns, config) is not None:
        return None
    return metrics.measure_rows(known, columns, columns.baseline).metric_set()


def _curves(candidate: metrics.Measured) -> dict[str, object]:
    """What the report draws of the candidate, by field of the evaluation."""
    rows = candidate.rows
    if isinstance(rows, RankedClasses):
        rows = rows.stacked(metrics.CALIBRATION_BINS)
    if isinstance(rows, RankedRows):
        return {
            "roc": metrics.roc_curve(rows),
            "precision_recall": metrics.precision_recall_curve(rows),
            "calibration": metrics.calibration_curve(rows),
        }
    none = dict.fromkeys(("roc", "precision_recall", "calibration"), ())
    return {
        **none,
        "observed": metrics.observed_by_prediction(rows),
        "residuals": metrics.residual_classes(rows),
    }


def judge_served(
    served: ServedWindow, config: EvaluationConfig, store: ArtifactStore
) -> evaluation.ScoredWindow:
    """The scores that were served, as `score_window` gives those that it makes; none is made here.

    Raises:
        ArtifactError: an artifact is absent or damaged.
    """
    snapshot = served.dataset.snapshot
    rows = pd.read_parquet(store.path(served.scores))
    return judge_scored(
        rows, served.program_sha256, served.dataset, snapshot.window, served.scores, config
    )


def judge_scored(
    rows: pd.DataFrame,
    program_sha256: str,
    dataset: ValidatedDataset,
    window: TimeWindow,
    scores: Artifact,
    config: EvaluationConfig,
) -> evaluation.ScoredWindow:
    """Quality of scored rows whose label is known.

    Args:
        rows: row id, event time, label, baseline if any, and `score`, of the window.
        program_sha256: of the model.
        dataset: where the rows come from.
        window: of the rows.
        scores: file that holds these rows and scores, perhaps with others.
        config: the fewest rows.
    """
    columns = dataset.snapshot.columns
    labelled = rows[rows[columns.label].notna()]
    unjudged = metrics.why_not_judged(labelled, columns, config)
    with threadpool_limits(1):  # more wait for each other
        measured = None if unjudged else metrics.measure_rows(labelled, columns, SCORE)
    is_ranked = measured is not None and not measured.is_number
    return evaluation.ScoredWindow(
        program_sha256=program_sha256,
        snapshot_sha256=dataset.snapshot.data.sha256,
        window=window,
        num_rows=len(rows),
        scores=scores,
        metrics=measured.metric_set(each=True) if measured else None,
        excess_brier=measured.metric("excess_brier") if measured and is_ranked else None,
        unjudged=unjudged,
    )


SMALLEST_REPORTED = 1e-4
"""Differences below this matter to nobody, however surely they are measured."""


def judge_networks(
    student: CompressedModel,
    parent: RegisteredProgram,
    distilled: TrainedModel | None,
    control: TrainedModel,
    dataset: ValidatedDataset,
    config: EvaluationConfig,
    store: ArtifactStore,
) -> evaluation.StudentReport:
    """Judge all of them on the student's test rows, with the same bootstrap draws.

    Args:
        student: the network that is offered.
        parent: the version it came from.
        distilled: the network that learnt from the parent; None where none did.
        control: the control run, from labels alone.
        dataset: the snapshot that they were trained on.
        config: the fewest rows.
        store: holds programs and snapshot.

    Raises:
        DataContractError: the test rows cannot be judged, or a program does not give one score a
            row.
        ArtifactError: an artifact is absent or damaged.
    """
    columns, window = student.columns, student.splits.test  # a model takes columns of its own
    names = metrics.judged_columns(columns)

    def measured(model: CandidateModel | RegisteredProgram) -> metrics.Measured:
        takes = model.raw_columns if isinstance(model, RegisteredProgram) else model.columns
        rows = score_rows(Program.open(model.program, takes, store), dataset, window, names, store)
        metrics.check_judgeable(rows, columns, window, config)
        return metrics.measure_rows(rows, columns, SCORE)

    ours, original = measured(student), measured(parent)
    with_teacher = None if distilled is None else measured(distilled)
    alone = None if distilled is None else measured(control)
    report = evaluation.StudentReport(
        window=student.splits.test,
        parent=original.metric_set(),
        student=ours.metric_set(),
        to_parent=ours.minus(original, "parent"),
        distilled=with_teacher.metric_set() if with_teacher else None,
        control=alone.metric_set() if alone else None,
        gain=with_teacher.minus(alone, "control run") if with_teacher and alone else None,
        refusal=None,
    )
    return report.model_copy(update={"result": who_won(report), "refusal": why_refused(report)})


def why_refused(report: evaluation.StudentReport) -> str | None:
    """Why a smaller network is not good enough to be offered, in words; None where it is.

    Its quality must not lie below the 95 % interval of the network that it came from.
    """
    parent, student = report.parent.primary, report.student.primary
    if student.value >= parent.low:  # False of NaN
        return None
    name = report.parent.primary_name
    return (
        f"on {report.parent.num_rows:,} rows of {report.window} the smaller network has {name} "
        f"{student.value:.4f}, below the interval of the one that it came from, {parent:.4f}; "
        "expected at least its lower end. Nothing was registered; take out less, train longer, or "
        "let the student be larger"
    )


def who_won(report: evaluation.StudentReport) -> str | None:
    """Whether a teacher helped, in words; None where there was none."""
    if report.gain is None:
        return None
    change, name = report.gain.primary, report.parent.primary_name
    if abs(change.value) < SMALLEST_REPORTED:
        result = "The teacher made no difference"
    elif change.low > 0:
        result = "The teacher helped"
    else:
        result = "The teacher did harm" if change.high < 0 else "Nobody can tell if it helped"
    rows = f"{report.parent.num_rows:,} test rows"
    return f"{result}: distilled minus control is {name} {change:+.4f} on {rows}."
