"""The gates of a promotion: pure functions from evidence to open or closed, with the numbers.

Every gate fails closed. Comparisons are written so that NaN, and a number that no such measure can
have, close it; so does what is missing, doubled or of another digest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import AUC_NAME, ValidatedDataset
from tasks.contracts.evaluation import (
    Comparison,
    EvaluationReport,
    Metric,
    MetricSet,
    Quality,
    RegressionMetrics,
    SingleFeature,
    SliceMetrics,
)
from tasks.contracts.release import GateResult, ModelVariant
from tasks.registry.config import PromotionConfig
from tasks.registry.model_folder import VariantList, VersionRecord

SECONDS_PER_DAY = 86_400
TINY = 1e-30
LEAST_LIFT = 0.2
"""AUC above chance, or R2, below which an input tells too little to be suspected."""
NEARLY_ALL, HARDLY_ANY = 0.9, 0.5
NOT_OF_ONE_TASK = "the metrics are not all of the task that the model is for"


@dataclass(frozen=True)
class Evidence:
    """Everything the gates look at."""

    candidate: ModelVersionRef
    record: VersionRecord
    """What the registry holds of the candidate, read back."""
    evaluation: EvaluationReport
    dataset: ValidatedDataset
    variants: tuple[ModelVariant, ...]
    lost: tuple[str, ...]
    """A sentence for each artifact that the evidence names and the store no longer has whole."""
    champion: ModelVersionRef | None
    """What the alias `champion` points at now."""
    now: datetime
    withdrawn: str | None = None
    """Why the version must never serve again; None where nobody said so."""


Gate = Callable[[Evidence, PromotionConfig], tuple[bool, str]]


def judge(evidence: Evidence, config: PromotionConfig) -> tuple[GateResult, ...]:
    """Results of all gates of the task, in the order in which they are shown; all are asked."""
    is_number = isinstance(evidence.evaluation.overall, RegressionMetrics)
    results = []
    for name, gate in (REGRESSION_GATES if is_number else GATES).items():
        passed, sentence = gate(evidence, config)
        results.append(GateResult(name=name, passed=passed, evidence=sentence))
    return tuple(results)


def same_digests(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """Program, evaluation, snapshot, validation, variants and registry tell of the same things."""
    program, snapshot = evidence.candidate.program_sha256, evidence.candidate.snapshot_sha256
    record, dataset = evidence.record, evidence.dataset
    claims = [
        ("the registry's program", record.ref.program_sha256, program),
        ("the evaluation's program", evidence.evaluation.model_sha256, program),
        *((f"the source of {v.name}", v.source_sha256, program) for v in evidence.variants),
        ("the registry's snapshot", record.ref.snapshot_sha256, snapshot),
        ("the evaluation's snapshot", evidence.evaluation.snapshot_sha256, snapshot),
        ("the dataset's snapshot", dataset.snapshot.data.sha256, snapshot),
        ("the validated snapshot", dataset.validation.subject_sha256, snapshot),
    ]
    if record.manifest is not None:
        claims.append(("the manifest's snapshot", record.manifest.snapshot_sha256, snapshot))
    wrong = [
        f"{what} is {seen[:12]}, not {want[:12]}" for what, seen, want in claims if seen != want
    ]
    if wrong:
        return False, "digests do not match: " + "; ".join(wrong)
    return True, (
        f"{len(claims)} claims agree on program {program[:12]} and snapshot {snapshot[:12]}, which "
        f"suite {dataset.validation.suite!r} validated ({dataset.validation.num_expectations} "
        "expectations)"
    )


def whole_artifacts(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """The version's files and the artifacts of its evidence are there and have their digests."""
    record = evidence.record
    problems = [*record.damage, *evidence.lost]
    if record.manifest is None:
        problems.append("the version has no readable manifest")
    if record.variants is None:
        problems.append("the version has no readable list of variants")
    elif _filed_for_the_same(record.variants, evidence.variants) != evidence.variants:
        problems.append("the variants in the registry are not those that were presented")
    if problems:
        return False, "; ".join(problems)
    kept = [v.name for v in evidence.variants if v.accepted]
    return True, (
        f"the model's files, {len(kept)} kept variants, the snapshot, its validation result and "
        "the stored predictions have their digests"
    )


def _filed_for_the_same(
    listed: VariantList, presented: tuple[ModelVariant, ...]
) -> tuple[ModelVariant, ...]:
    """The registry's variants for the hardware classes of these; all, where these are none."""
    classes = {variant.hardware_class for variant in presented}
    filed = (entry.variant for entry in listed.variants)
    return tuple(v for v in filed if not classes or v.hardware_class in classes)


def not_withdrawn(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """Nobody withdrew the version, or the one that it was made from."""
    return evidence.withdrawn is None, evidence.withdrawn or "nobody withdrew it"


def later_test_window(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """The model was judged on rows that are all later than those it was fitted and chosen on."""
    manifest, window = evidence.record.manifest, evidence.evaluation.window
    if manifest is None:
        return False, "no manifest says what the model was trained on"
    seen_until = max(manifest.splits.train.end, manifest.splits.validation.end)
    passed = window.start >= seen_until
    return passed, (
        f"judged on {window}, trained and chosen on rows up to {seen_until:%Y-%m-%dT%H:%MZ}"
    )


def quality_floor(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """The AUC (or R2) reaches its floor."""
    overall = evidence.evaluation.overall
    floor = config.min_r2 if isinstance(overall, RegressionMetrics) else config.min_auc
    quality = overall.primary
    return quality.value >= floor, f"{overall.primary_name} {quality:.4f}, floor {floor:.4f}"


def leak_suspicion(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """Neither the AUC (or R2) nor what one input tells by itself is too good to be true."""
    report, overall = evidence.evaluation, evidence.evaluation.overall
    is_number = isinstance(overall, RegressionMetrics)
    limit = config.max_plausible_r2 if is_number else config.max_plausible_auc
    reference = report.baseline_model.primary.value
    passed = overall.primary.value <= limit and reference <= limit
    judgement = "plausible" if passed else "a leak of the label into the features is suspected"
    reason = (
        f"{overall.primary_name} {overall.primary:.4f}, of the baseline model {reference:.4f}, "
        f"plausible up to {limit:.4f}: {judgement}"
    )
    sudden = [feature for feature in report.leading if _knows_suddenly(feature, report)]
    for feature in sudden:
        reason += (
            f"; {feature.name} alone gives {feature.score:.4f}, nearly all of that, and one row "
            f"earlier {feature.earlier_score:.4f}: it becomes known with the label. Look when it "
            "is known, and name it among `trusted` of the training set where that is in time"
        )
    return passed and not sudden, reason


def baseline_model(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """AUC (or R2) is at most a margin below the baseline model's; or the champion is worse."""
    report, margin = evidence.evaluation, config.baseline_model_margin
    comparison = _only(report.comparisons, "yardstick")
    if comparison is None:
        return False, "there is not exactly one comparison with the baseline model"
    difference, name = comparison.primary, report.baseline_model.primary_name
    instead = "" if _within(difference.value, -margin, report.overall) else _instead(evidence)
    least = -math.inf if isinstance(report.overall, RegressionMetrics) else -1
    floor = least if instead else -margin
    return _within(difference.value, floor, report.overall), (
        f"{name} minus that of {report.baseline_model_name} "
        f"({report.baseline_model.primary.value:.4f}) is {difference:+.4f}, "
        f"allowed from -{margin:.4f}{instead}"
    )


def champion(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """The candidate holds against the champion of this moment, by the paired interval."""
    current = evidence.champion
    if current is None:
        return True, "there is no champion yet"
    if current.version == evidence.candidate.version:
        return True, f"version {current.version} is the champion already; the alias stays"
    if current.program_sha256 == evidence.candidate.program_sha256:
        return True, f"version {current.version} is the champion and the same program"
    comparison = _only(evidence.evaluation.comparisons, f"champion:{current.version}")
    if comparison is None:
        seen = ", ".join(c.against for c in evidence.evaluation.comparisons) or "nothing"
        return False, (
            f"the champion is version {current.version}, the evaluation compares with {seen}; "
            "evaluate against the present champion"
        )
    low, overall = comparison.primary.low, evidence.evaluation.overall
    margin = config.champion_margin
    passed, wanted = _within(low, -margin, overall), f"at or above -{margin:.4f}"
    if config.champion_rule == "better" and _maps(evidence.record, current):
        # A map leaves the ranking as it is; what it can make better is the error.
        passed = passed and comparison.error.high < 0
        wanted += f" of a recalibration, and the {comparison.error_name} surely lower; it changed "
        wanted += f"by {comparison.error:+.4f}"
    elif config.champion_rule == "better":
        passed, wanted = low > 0 and _within(low, 0, overall), "above zero"
    return passed, (
        f"{overall.primary_name} minus that of version {current.version} is "
        f"{comparison.primary:+.4f} on the same rows; rule {config.champion_rule!r} wants the "
        f"lower bound {wanted}"
    )


def _maps(record: VersionRecord, current: ModelVersionRef) -> bool:
    """The candidate is the current champion with another map of its scores."""
    made = record.manifest.calibration if record.manifest else None
    return made is not None and made.source == current


def calibration(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """Scores mean what they say."""
    overall, limit = evidence.evaluation.overall, config.max_calibration_error
    if not isinstance(overall, MetricSet):
        return False, NOT_OF_ONE_TASK
    error = overall.calibration_error
    return 0 <= error.value <= limit, f"calibration error {error:.4f}, ceiling {limit:.4f}"


def worst_slice(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """No judged slice of the rows is left behind: by AUC, or by RMSE beside a plain prediction."""
    slices, floor, ceiling = evidence.evaluation.slices, config.min_slice_auc, 1.0
    if not slices:
        return False, "the evaluation judged no slice"
    is_number = isinstance(evidence.evaluation.overall, RegressionMetrics)
    if is_number:
        floor, ceiling = 0.0, config.max_slice_error_ratio
    found = [
        (part, figure)
        for part in slices
        if (figure := part.error_ratio if is_number else _auc_of(part)) is not None
    ]
    if len(found) < len(slices):
        return False, NOT_OF_ONE_TASK
    passed = all(floor <= figure.value <= ceiling for _, figure in found)
    sign = -1 if is_number else 1
    part, worst = min(found, key=lambda pair: _nan_first(sign * pair[1].value))
    where = f"{part.column}={part.value} ({part.metrics.num_rows:,} rows)"
    if is_number:
        return passed, (
            f"worst of {len(found)} slices is {where}: its RMSE is {worst:.4f} times that of "
            "the better plain prediction there, baseline model or baseline; ceiling "
            f"{ceiling:.4f}"
        )
    return passed, (
        f"worst of {len(found)} slices is {where} with {AUC_NAME} {worst:.4f}, floor {floor:.4f}"
    )


def _auc_of(part: SliceMetrics) -> Metric | None:
    return part.metrics.auc if isinstance(part.metrics, MetricSet) else None


def baseline(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """The model knows more than the baseline, beyond doubt; or the champion is worse."""
    overall, floor = evidence.evaluation.overall, config.min_skill
    name = evidence.evaluation.baseline_name
    if name is None:
        return True, "no baseline is named"
    if not isinstance(overall, RegressionMetrics) or overall.skill is None:
        return False, f"the skill over the baseline {name} is not known"
    low = overall.skill.low
    instead = "" if low > floor else _instead(evidence)
    return math.isfinite(low) and low <= 1 and (low > floor or bool(instead)), (
        f"skill over the baseline {name} is {overall.skill:.4f}; its lower bound has to lie "
        f"above {floor:.4f}{instead}"
    )


def _instead(evidence: Evidence) -> str:
    """Why no plain prediction refuses the candidate; nothing where one does.

    On the same rows the champion surely errs more: to refuse the candidate would keep what is worse
    still.
    """
    current = evidence.champion
    if current is None:
        return ""
    comparison = _only(evidence.evaluation.comparisons, f"champion:{current.version}")
    if comparison is None or not -math.inf < comparison.error.low <= comparison.error.high < 0:
        return ""
    return (
        f"; not asked for, since version {current.version}, which serves now, surely errs more on "
        f"these rows: {comparison.error_name} changed by {comparison.error:+.4f}"
    )


def bias(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """Predictions are not too high or too low on the whole."""
    overall, limit = evidence.evaluation.overall, config.max_bias
    if not isinstance(overall, RegressionMetrics):
        return False, NOT_OF_ONE_TASK
    share = abs(overall.bias.value) / max(overall.label_deviation, TINY)
    return share <= limit, (
        f"predictions lie {overall.bias:+.4f} {overall.unit} off on average, {share:.3f} "
        f"standard deviations of the label; ceiling {limit:.3f}"
    )


def hardware(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """Each required hardware class has a variant that earned its place."""
    listed = evidence.record.variants
    kept: dict[str, list[str]] = {name: [] for name in config.required_hardware}
    for entry in listed.variants if listed is not None else ():
        if entry.variant.accepted and entry.folder is not None:
            kept.setdefault(entry.variant.hardware_class, []).append(entry.variant.name)
    bare = [name for name in config.required_hardware if not kept[name]]
    if bare:
        return False, f"no kept variant for {', '.join(bare)}"
    shown = "; ".join(f"{name}: {', '.join(names)}" for name, names in kept.items())
    return True, f"kept variants: {shown or 'none required'}"


def freshness(evidence: Evidence, config: PromotionConfig) -> tuple[bool, str]:
    """The judgement is of recent data, where an age limit is set."""
    end = evidence.evaluation.window.end
    age = (evidence.now - end).total_seconds() / SECONDS_PER_DAY
    if config.max_age_days is None:
        return True, f"the test window ended {end:%Y-%m-%d}; no age limit is set"
    return 0 <= age <= config.max_age_days, (
        f"the test window ended {end:%Y-%m-%d}, {age:.0f} days ago; allowed {config.max_age_days}"
    )


def _named(*gates: Gate) -> dict[str, Gate]:
    """Gates by name: a decision has `worst-slice` of the gate `worst_slice`."""
    return {gate.__name__.replace("_", "-"): gate for gate in gates}


_FIRST = _named(same_digests, whole_artifacts, not_withdrawn, later_test_window)
_LAST = _named(worst_slice, hardware, freshness)
GATES = {
    **_FIRST,
    "auc-floor": quality_floor,
    **_named(leak_suspicion, baseline_model, champion, calibration),
    **_LAST,
}
"""Of a classification, in the order in which they are shown."""
REGRESSION_GATES = {
    **_FIRST,
    "r2-floor": quality_floor,
    **_named(leak_suspicion, baseline, baseline_model, champion, bias),
    **_LAST,
}


def settings_of(gate: Gate) -> tuple[str, ...]:
    """Fields of `promotion` that a gate reads."""
    return tuple(name for name in PromotionConfig.model_fields if name in gate.__code__.co_names)


def _knows_suddenly(feature: SingleFeature, report: EvaluationReport) -> bool:
    """One input carries nearly all that a model can know, and in the row before hardly any."""
    chance = 0.5 if isinstance(report.overall, MetricSet) else 0.0
    whole = max(report.overall.primary.value, report.baseline_model.primary.value) - chance
    lift = feature.score - chance
    if feature.trusted or feature.earlier_score is None or lift < LEAST_LIFT:
        return False
    return lift >= NEARLY_ALL * whole and feature.earlier_score - chance < HARDLY_ANY * lift


def _within(difference: float, floor: float, overall: Quality) -> bool:
    """Whether a difference reaches its floor and is one that the metric can have."""
    most = math.inf if isinstance(overall, RegressionMetrics) else 1
    return floor <= difference <= most and not math.isinf(difference)


def _only(comparisons: tuple[Comparison, ...], against: str) -> Comparison | None:
    found = [c for c in comparisons if c.against == against]
    return found[0] if len(found) == 1 else None


def _nan_first(value: float) -> float:
    return -math.inf if math.isnan(value) else value
