"""What a run record shows, in the order and the figures of the page. Nothing is computed anew."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contracts import evaluation
from tasks.contracts.conversion import VariantLatency
from tasks.contracts.data import ValidationResult
from tasks.contracts.drift import DriftResult, FeatureDrift
from tasks.contracts.hardware import J_PER_KWH
from tasks.contracts.release import ModelVariant
from tasks.contracts.run import RunRecord
from tasks.contracts.telemetry import RankTelemetry, TrainingTelemetry
from tasks.contracts.training import TrainedModel
from tasks.reporting.quantities import (
    MISSING,
    count,
    days,
    decimal,
    duration,
    estimate,
    factor,
    interval,
    is_shown,
    milliseconds,
    percent,
    plural,
    significant,
)

DIGITS = ((1000.0, 0), (10.0, 1), (0.0, 3))
"""From which size on numbers have how many digits after the point."""
MOST_ORIGINS = 24
_NATURAL_ORDER = re.compile(r"\d+([-./: ]\d+)*")


@dataclass(frozen=True)
class Result:
    """One decision; `tone` is `good`, `care` or `bad`."""

    tone: str
    sign: str
    headline: str
    detail: str


@dataclass(frozen=True)
class Tile:
    """One key figure with its interval and one line of context."""

    title: str
    value: str
    interval: str
    note: str


def promotion_result(record: RunRecord) -> Result:
    """Promoted, refused (by which gates), or nothing to move."""
    decision = record.promotion
    version, before = decision.candidate.version, decision.previous_champion
    closed = decision.closed
    num_passed = len(decision.gates) - len(closed)
    passed = f"{num_passed} of {plural(len(decision.gates), 'gate')} passed"
    kept = f"version {before} stays the champion" if before else "there is no champion"
    if decision.promoted and before == version:
        detail = f"{passed}; it was the champion already."
        return Result("good", "✓", f"Version {version} stays the champion", detail)
    if decision.promoted:
        was = f"it takes the place of version {before}" if before else "it is the first"
        headline = f"Promoted: version {version} is the champion"
        return Result("good", "✓", headline, f"{passed}; {was}.")
    if closed:
        detail = f"{passed}, version {version} is not promoted; {kept}."
        return Result("bad", "✕", f"Refused: {', '.join(closed)}", detail)
    became = decision.approval.outcome if decision.approval else "was not moved"
    headline = f"Version {version} {became}"
    return Result("care", "→", headline, f"{passed}; {kept}.")


def drift_result(record: RunRecord) -> Result:
    """What the drift check advises, with how many features moved."""
    moved = sum(f.drifted for f in record.drift.features)
    detail = (
        f"{moved} of {plural(len(record.drift.features), 'feature')} drifted: "
        f"{days(record.drift.current)} against {days(record.drift.reference)}."
    )
    tone, sign, headline = {
        DriftResult.STABLE: ("good", "✓", "Drift: stable, nothing to do"),
        DriftResult.WATCH: ("care", "◔", "Drift: watch, no reason to act yet"),
        DriftResult.RETRAIN: ("care", "↻", "Drift: retraining is advised"),
        DriftResult.DATA_FAULT: ("bad", "✕", "Drift: a fault in the data, mend it first"),
    }[record.drift.result]
    return Result(tone, sign, headline, detail)


def key_figures(record: RunRecord) -> tuple[Tile, ...]:
    """The numbers that a reader wants first."""
    snapshot, report, model = record.dataset.snapshot, record.evaluation, record.model
    overall, labels = report.overall, snapshot.label_summary
    excluded = sum(e.num_rows for e in snapshot.excluded)
    described = f"{percent(snapshot.positive_rate)} positive"
    if shares := snapshot.class_shares:
        rarest = min(shares, key=lambda name: shares[name])
        described = f"{len(shares)} classes, the rarest {rarest} ({percent(shares[rarest])})"
    if labels is not None:
        unit = f"{sized(labels.mean)} {snapshot.columns.unit}".strip()
        described = f"{unit} on average, standard deviation {sized(labels.deviation)}"
    return (
        Tile(
            "Labelled rows",
            count(snapshot.num_rows),
            "",
            f"{described}; {count(excluded)} more without a label",
        ),
        Tile(
            f"{overall.primary_name} on the test window",
            decimal(overall.primary.value),
            interval(overall.primary),
            f"baseline model {estimate(report.baseline_model.primary)}, "
            f"{report.baseline_model_name}",
        ),
        _error_tile(report),
        _latency_tile(record.variants),
        Tile(
            "Training",
            duration(model.seconds),
            "",
            f"{model.strategy}, {plural(len(model.epochs), 'step')} of ten trees"
            if model.kind == BOOSTING
            else f"{plural(model.num_ranks, 'rank')} ({model.strategy}), "
            f"{plural(len(model.epochs), 'epoch')}",
        ),
        Tile(
            "The whole loop",
            duration(sum(s.seconds for s in record.stages if is_shown(s.seconds))),
            "",
            f"{sum(s.reused for s in record.stages)} of {plural(len(record.stages), 'stage')} "
            "reused from earlier runs",
        ),
    )


BOOSTING, AVERAGE, NETWORK = "gradient-boosting", "average", "network"


def learned(model: TrainedModel) -> str:
    """What was trained, on what, how long, and which epoch was kept."""
    what = {
        NETWORK: "A network of {} parameters",
        BOOSTING: "Boosted trees of {} thresholds and leaves",
        AVERAGE: "A network and boosted trees of {} parameters together",
    }.get(model.kind, f"The module of {model.kind}, of {{}} parameters,")
    rows, best, epochs = days(model.splits.validation), model.best_epoch, len(model.epochs)
    where = f"on {plural(model.num_ranks, 'rank')} ({model.strategy})"
    kept = f"Of {plural(epochs, 'epoch')}, number {best} did best on {rows} and was kept."
    if model.kind == BOOSTING:
        where = f"with {model.strategy}"
        kept = f"Of {plural(epochs, 'step')} of ten trees, the first {best + 1} did best on {rows} "
        kept += "and were kept."
    if model.kind == AVERAGE:
        kept = f"Epoch {best}, the last one, is the mean of the best epoch and the trees on {rows}."
    what = f"{what.format(count(model.num_parameters))} learned from {days(model.splits.train)}"
    return f"{what} {where} in {duration(model.seconds)}. {kept}"


def _error_tile(report: evaluation.EvaluationReport) -> Tile:
    overall = report.overall
    if isinstance(overall, evaluation.MetricSet):
        note = "mean gap between a score and what came true"
        return Tile("Calibration error", *cell(overall.calibration_error), note)
    note = "no baseline is named"
    if report.baseline is not None and overall.skill is not None:
        baseline = sized(report.baseline.mae.value)
        note = f"the baseline has {baseline}, skill {estimate(overall.skill)}"
    note = f"{overall.unit}; {note}" if overall.unit else note
    return Tile("Mean absolute error", *cell(overall.mae), note)


def _latency_tile(variants: Sequence[ModelVariant]) -> Tile:
    title, best = "Fastest CPU variant, one row", fastest_on_cpu(variants)
    if best is None:
        return Tile(title, "none", "", "no CPU variant was kept and measured with one row")
    variant, latency = best
    note = (
        f"{factor(latency.ratio_to_eager)} of PyTorch eager; {variant.name}, 95 % of requests "
        f"within {milliseconds(latency.p95_ms)}"
    )
    return Tile(title, milliseconds(latency.p50_ms), "", note)


def fastest_on_cpu(variants: Sequence[ModelVariant]) -> tuple[ModelVariant, VariantLatency] | None:
    """The kept variant for a CPU with the lowest median latency at batch 1, if there is one."""
    measured = [
        (variant, latency)
        for variant in variants
        if variant.accepted and variant.hardware_class.lower().startswith("cpu")
        for latency in variant.latencies
        if latency.batch_rows == 1 and is_shown(latency.p50_ms)
    ]
    return min(measured, key=lambda pair: pair[1].p50_ms, default=None)


def suites(record: RunRecord) -> tuple[ValidationResult, ...]:
    """Every validation that vouched for something in this run, in order, each once."""
    refresh = record.refresh
    results = [*refresh.rows.validations, *refresh.validations, record.dataset.validation]
    return tuple({(r.suite, r.subject, r.subject_sha256): r for r in results}.values())


def comparisons(record: RunRecord) -> list[evaluation.Comparison]:
    """The paired comparisons, with names that a reader knows."""
    renamed = []
    for part in record.evaluation.comparisons:
        name = part.against.replace("champion:", "champion, version ")
        name = name.replace("yardstick", "baseline model")
        renamed.append(part.model_copy(update={"against": name}))
    return renamed


def meaning(change: evaluation.Metric) -> str:
    """What a paired difference of the first metric allows to claim."""
    if not (is_shown(change.low) and is_shown(change.high)):
        return "its interval could not be computed"
    if change.low > 0:
        return "the candidate is better"
    return "the candidate is worse" if change.high < 0 else "these rows cannot tell the two apart"


def is_regression(record: RunRecord) -> bool:
    """Whether the model gives numbers and not probabilities."""
    return isinstance(record.evaluation.overall, evaluation.RegressionMetrics)


def models(report: evaluation.EvaluationReport) -> list[tuple[str, evaluation.Quality]]:
    """The candidate, the baseline model and, of a regression, the baseline; each of classes."""
    found: list[tuple[str, evaluation.Quality]] = [
        ("candidate", report.overall),
        (report.baseline_model_name, report.baseline_model),
    ]
    if report.baseline is not None:
        found.append((f"baseline, {report.baseline_name}", report.baseline))
    if isinstance(report.overall, evaluation.MetricSet):
        each = report.overall.by_class.items()
        found += [(f"candidate, {name} against the rest", quality) for name, quality in each]
    return found


def figures(metrics: evaluation.Quality) -> list[tuple[str, str, evaluation.Metric | None]]:
    """Name, better direction and value of each metric."""
    if isinstance(metrics, evaluation.MetricSet):
        return [
            ("AUC", "higher", metrics.auc),
            ("PR-AUC", "higher", metrics.pr_auc),
            ("Brier score", "lower", metrics.brier),
            ("Log loss", "lower", metrics.log_loss),
            ("Calibration error", "lower", metrics.calibration_error),
        ]
    return [
        ("R²", "higher", metrics.r2),
        ("RMSE", "lower", metrics.rmse),
        ("MAE", "lower", metrics.mae),
        ("Bias", "near 0", metrics.bias),
        ("Skill over baseline", "higher", metrics.skill),
    ]


def cell(metric: evaluation.Metric | None) -> tuple[str, str]:
    """A metric and its interval, with as many digits as fit its size."""
    if metric is None:
        return MISSING, ""
    digits = digits_of(metric.value, metric.low, metric.high)
    return decimal(metric.value, digits), interval(metric, digits)


def digits_of(*values: float) -> int:
    """Digits after the point that fit the size of some numbers."""
    largest = max((abs(v) for v in values if is_shown(v)), default=0.0)
    return next(digits for least, digits in DIGITS if largest >= least)


def sized(value: float) -> str:
    """A number in the label's unit, with digits that fit its size."""
    return decimal(value, digits_of(value))


def with_label_unit(words: str, report: evaluation.EvaluationReport) -> str:
    """Words followed by the label's unit, where it has one."""
    unit = report.overall.unit if isinstance(report.overall, evaluation.RegressionMetrics) else ""
    return f"{words}, {unit}" if unit else words


def slice_metric(metrics: evaluation.Quality) -> tuple[str, evaluation.Metric]:
    """What slices are compared by. R2 says little of a slice whose labels hardly differ."""
    if isinstance(metrics, evaluation.MetricSet):
        return metrics.primary_name, metrics.auc
    return "Mean absolute error", metrics.mae


def slices_by_column(
    report: evaluation.EvaluationReport,
) -> dict[str, list[evaluation.SliceMetrics]]:
    """Slices of each column: numbers and dates in their own order, names from best to worst."""
    groups: dict[str, list[evaluation.SliceMetrics]] = {}
    for part in report.slices:
        groups.setdefault(part.column, []).append(part)
    sign = 1 if isinstance(report.overall, evaluation.MetricSet) else -1
    for parts in groups.values():
        if all(_NATURAL_ORDER.fullmatch(p.value) for p in parts):
            parts.sort(key=lambda p: [int(n) for n in re.findall(r"\d+", p.value)])
        else:
            parts.sort(key=lambda p: _by_size(sign * slice_metric(p.metrics)[1].value))
    return groups


def _by_size(value: float) -> tuple[bool, float]:
    return (not is_shown(value), -value if is_shown(value) else 0.0)


def features_by_drift(record: RunRecord) -> list[FeatureDrift]:
    """Drifted features first, each part from the largest effect down."""
    return sorted(record.drift.features, key=lambda f: (not f.drifted, _by_size(f.effect)))


@dataclass(frozen=True)
class Bar:
    """One bar of the page: where it begins and how wide it is, as shares of the picture."""

    name: str
    left: float
    width: float
    text: str
    kind: str = ""


def windows(record: RunRecord) -> list[Bar]:
    """Which span of time served which purpose: nothing is judged on what it was trained on."""
    splits, drift = record.model.splits, record.drift
    spans = [
        ("all rows", record.dataset.snapshot.window),
        ("train", splits.train),
        ("validate", splits.validation),
        ("test", splits.test),
        ("drift reference", drift.reference),
        ("quality reference", drift.performance_reference),
        ("drift current", drift.current),
    ]
    known = [(name, span) for name, span in spans if span is not None]
    first, last = min(s.start for _, s in known), max(s.end for _, s in known)
    return [
        Bar(name, (s.start - first) / (last - first), (s.end - s.start) / (last - first), days(s))
        for name, s in known
    ]


def latencies(record: RunRecord) -> dict[int, list[Bar]]:
    """Median latency of each variant by batch size, on one logarithmic scale, fastest first."""
    measured = [
        (variant, at)
        for variant in record.variants
        for at in variant.latencies
        if is_shown(at.p50_ms) and at.p50_ms > 0
    ]
    scale = [math.log10(at.p50_ms) for _, at in measured]
    low, high = min(scale, default=0.0) - 0.5, max(scale, default=0.0)
    groups: dict[int, list[Bar]] = {}
    for variant, at in sorted(measured, key=lambda pair: (pair[1].batch_rows, pair[1].p50_ms)):
        text = f"{milliseconds(at.p50_ms)} · {factor(at.ratio_to_eager)} eager"
        width = (math.log10(at.p50_ms) - low) / (high - low)
        bar = Bar(variant.name, 0, width, text, "" if variant.accepted else "dropped")
        groups.setdefault(at.batch_rows, []).append(bar)
    return groups


@dataclass(frozen=True)
class Choice:
    """One goal on one hardware class, and what serves it."""

    goal: str
    hardware_class: str
    variant: str
    rule: str
    reason: str


def choices(record: RunRecord) -> list[Choice]:
    """For each goal and hardware class the variant that serves it; also where there is none."""
    found: dict[tuple[str, str], Choice] = {}
    nobody = "no variant", "none was kept that meets the goal and is worth it"
    for variant in record.variants:
        for standing in variant.standings:
            key = standing.goal, variant.hardware_class
            if standing.chosen or key not in found:
                name, why = (variant.name, standing.reason) if standing.chosen else nobody
                found[key] = Choice(*key, name, standing.rule, why)
    return list(found.values())


@dataclass(frozen=True)
class Origin:
    """A version of something; `dropped` ones are outlined with dashes."""

    name: str
    digest: str
    tip: str = ""
    dropped: bool = False


def origins(record: RunRecord) -> dict[str, list[Origin]]:
    """What the variants came from, from the raw files on, by kind; as many as can be shown."""
    snapshot, version = record.dataset.snapshot, record.version
    landed = [t for t in record.refresh.rows.landed.tables if t.source is not None]
    views = snapshot.pins.views if snapshot.pins else {}
    found = {
        "raw files": [
            Origin(t.source.uri.rstrip("/").rsplit("/", 1)[-1], t.source.sha256, t.source.uri)
            for t in landed
            if t.source is not None
        ],
        "tables": [
            Origin(t.name, t.artifact.sha256, plural(t.num_rows, "row"))
            for t in record.refresh.tables.raw
        ],
        "feature views": [
            Origin(name, digest, f"{name}@v{views[name].version}" if name in views else name)
            for name, digest in snapshot.feature_views.items()
        ],
        "snapshot": [
            Origin(snapshot.feature_service, snapshot.data.sha256, plural(snapshot.num_rows, "row"))
        ],
        "model": [Origin(f"{version.name} {version.version}", version.program_sha256)],
        "variants": [
            Origin(v.name, v.files.sha256, v.reason, not v.accepted)
            for v in record.variants
            if v.files is not None
        ],
    }
    return {kind: _counted(things) for kind, things in found.items() if things}


def _counted(things: list[Origin]) -> list[Origin]:
    """As many as can be shown; the last one counts the others."""
    if len(things) <= MOST_ORIGINS:
        return things
    rest = things[MOST_ORIGINS - 1 :]
    names = ", ".join(thing.name for thing in rest)
    return [*things[: MOST_ORIGINS - 1], Origin(f"and {len(rest)} more", "", names)]


def is_committed(record: RunRecord) -> bool:
    """Whether a commit, or a release, alone names the code."""
    return re.fullmatch(r"[0-9a-f]{7,64}|v\d[\w.+]*", record.code_commit) is not None


MOST_RANKS = 16
# Phase, what it is called, how its piece is drawn. Neighbours differ in lightness too, and a piece
# that is wide enough carries its share.
PIECES = (
    ("compute", "computing", "s1"),
    ("data", "waiting for rows", "s3"),
    ("exchange", "exchanging", "s2"),
    ("validate", "validating", "s1 soft"),
    ("checkpoint", "checkpoints", "s3 soft"),
    ("other", "other", "quiet"),
)


def describe_cost(telemetry: TrainingTelemetry) -> str:
    """Time, rates and energy in a paragraph; what is not known is said with its reason."""
    attempts = f" in {telemetry.num_attempts} attempts" if telemetry.num_attempts > 1 else ""
    rates = [r.rows_per_s for r in telemetry.ranks if is_shown(r.rows_per_s)]
    speed = "no rank trained long enough for a rate"
    if rates:
        ranks = plural(len(telemetry.ranks), "rank")
        speed = f"{ranks} trained on {count(sum(rates))} rows a second in all"
    return (
        f"The training took {duration(telemetry.seconds)}{attempts}; {speed}. {_energy(telemetry)}"
    )


def _energy(telemetry: TrainingTelemetry) -> str:
    energy = telemetry.energy
    if not is_shown(energy.joules):
        return f"Its energy is not known: {energy.known_by}."
    about = "about " if energy.estimated else ""
    amount = f"{significant(energy.joules)} J ({significant(energy.joules / J_PER_KWH)} kWh)"
    return f"It used {about}{amount} of energy ({energy.known_by})."


def shown_ranks(telemetry: TrainingTelemetry) -> list[RankTelemetry]:
    """All ranks, or those with the lowest rates where they are too many."""
    if len(telemetry.ranks) <= MOST_RANKS:
        return list(telemetry.ranks)
    return sorted(telemetry.ranks, key=lambda r: r.rows_per_s or 0.0)[:MOST_RANKS]


def phases(rank: RankTelemetry) -> list[tuple[str, str, float]]:
    """Name, kind of piece and seconds of each phase that took time."""
    found = [(name, kind, rank.phases.get(phase)) for phase, name, kind in PIECES]
    return [
        (name, kind, time.seconds)
        for name, kind, time in found
        if time is not None and is_shown(time.seconds) and time.seconds > 0
    ]


def longest(telemetry: TrainingTelemetry) -> float:
    """Seconds of the rank that took longest, of those that are shown."""
    every = [sum(s for _, _, s in phases(rank)) for rank in shown_ranks(telemetry)]
    return max(every, default=0.0) or 1.0
