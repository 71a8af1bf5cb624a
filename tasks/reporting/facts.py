"""What a run record says, in the words and the order of the page. Nothing is computed anew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tasks.contracts.conversion import VariantLatency
from tasks.contracts.data import ValidationResult
from tasks.contracts.drift import DriftResult, FeatureDrift
from tasks.contracts.evaluation import Comparison, Metric, SliceMetrics
from tasks.contracts.release import Approval, ModelVariant, PromotionDecision
from tasks.contracts.run import RunRecord, StageTime
from tasks.kernel.settings import DEFAULT_FEATURE_REPO
from tasks.reporting.judgement import (
    describe_labels,
    describe_labels_at_length,
    describe_outputs,
    describe_skill,
    second_tile,
    slice_rank,
)
from tasks.reporting.quantities import (
    count,
    days,
    decimal,
    difference,
    duration,
    estimate,
    factor,
    interval,
    is_shown,
    milliseconds,
    plural,
)

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
    closed = [g.name for g in decision.gates if not g.passed]
    passed = f"{_num_passed(decision)} of {plural(len(decision.gates), 'gate')} passed"
    if decision.promoted and before == version:
        return Result(
            "good",
            "✓",
            f"Version {version} stays the champion",
            f"{passed}; it was the champion already.",
        )
    if decision.promoted:
        was = f"it takes the place of version {before}" if before else "it is the first"
        return Result(
            "good",
            "✓",
            f"Promoted: version {version} is the champion",
            f"{passed}; {was}.",
        )
    kept = f"version {before} stays the champion" if before else "there is no champion"
    if closed:
        return Result(
            "bad",
            "✕",
            f"Refused: {', '.join(closed)}",
            f"{passed}, version {version} is not promoted; {kept}.",
        )
    if decision.approval is not None:
        return _approval_result(decision.approval, version, f"{passed}; {kept}.")
    return Result("care", "→", f"Version {version} was not moved", f"No gate closed; {kept}.")


def _approval_result(approval: Approval, version: int, detail: str) -> Result:
    until = f"{approval.deadline:%Y-%m-%d %H:%M} UTC"
    headline = {
        "waiting": f"Version {version} waits for a person's approval until {until}",
        "approved": f"Version {version} is approved and was not moved",
        "rejected": f"Version {version} was rejected by {approval.approver}",
        "timed_out": f"Version {version} was rejected: nobody answered before {until}",
    }[approval.state]
    return Result("care", "→", headline, detail)


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
    snapshot, overall, model = record.dataset.snapshot, record.evaluation.overall, record.model
    excluded = sum(e.num_rows for e in snapshot.excluded)
    reused = sum(s.reused for s in record.stages)
    return (
        Tile(
            "Labelled rows",
            count(snapshot.num_rows),
            "",
            f"{describe_labels(record)}; {count(excluded)} more without a label",
        ),
        Tile(
            f"{overall.primary_name} on the test window",
            decimal(overall.primary.value),
            interval(overall.primary),
            f"baseline model {estimate(record.evaluation.baseline_model.primary)}, "
            f"{record.evaluation.baseline_model_name}",
        ),
        Tile(*second_tile(record)),
        _latency_tile(record.variants),
        Tile(
            "Training",
            duration(model.seconds),
            "",
            f"{plural(model.num_ranks, 'rank')} ({model.strategy}), "
            f"{plural(len(model.epochs), 'epoch')}",
        ),
        Tile(
            "The whole loop",
            duration(sum(s.seconds for s in record.stages if is_shown(s.seconds))),
            "",
            f"{reused} of {plural(len(record.stages), 'stage')} reused from earlier runs",
        ),
    )


def _latency_tile(variants: Sequence[ModelVariant]) -> Tile:
    title = "Fastest CPU variant, one row"
    best = fastest_on_cpu(variants)
    if best is None:
        return Tile(title, "none", "", "no CPU variant was kept and measured with one row")
    variant, latency = best
    return Tile(
        title,
        milliseconds(latency.p50_ms),
        "",
        f"{factor(latency.ratio_to_eager)} of PyTorch eager; {variant.name}, 95 % of calls within "
        f"{milliseconds(latency.p95_ms)}",
    )


def fastest_on_cpu(
    variants: Sequence[ModelVariant],
) -> tuple[ModelVariant, VariantLatency] | None:
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


def warnings(record: RunRecord) -> list[tuple[str, str]]:
    """Suite and sentence of every warning of this run."""
    return [(result.suite, sentence) for result in suites(record) for sentence in result.warnings]


def describe_monitoring(record: RunRecord) -> str:
    """The section of features over time in a paragraph."""
    seen = record.refresh.monitoring
    if seen is None:
        return "Features were not monitored in this run."
    text = (
        f"{plural(seen.num_statistics, 'statistic')} of {plural(len(seen.views), 'feature view')} "
        f"are kept for the days of {days(seen.window)}."
    )
    if seen.baseline is None:
        return f"{text} There is no baseline, so nothing was judged."
    return (
        f"{text} Against {days(seen.baseline)} they gave {plural(seen.num_alerts, 'alert')}. "
        "Drift is measured over whole weeks, and counts from what the baseline's own weeks "
        "differ by: most of it is the season."
    )


def describe_data(record: RunRecord) -> str:
    """The data section in a paragraph."""
    snapshot, passed = record.dataset.snapshot, suites(record)
    checks = sum(r.num_expectations for r in passed)
    return (
        f"{count(snapshot.num_rows)} rows of {days(snapshot.window)} carry a label; "
        f"{describe_labels_at_length(record)}. "
        f"{plural(len(passed), 'validation suite')} with {plural(checks, 'expectation')} passed "
        "before anything was trained."
    )


def describe_training(record: RunRecord) -> str:
    """The training section in a paragraph."""
    model = record.model
    energy = (
        f" It took {count(model.energy_j)} J of energy."
        if is_shown(model.energy_j)
        else " Energy could not be measured on this machine."
    )
    if model.telemetry is not None:  # which has a section of its own, with what is known of it
        energy = ""
    return (
        f"A network of {count(model.num_parameters)} parameters learned from "
        f"{days(model.splits.train)} on {plural(model.num_ranks, 'rank')} ({model.strategy}) in "
        f"{duration(model.seconds)}. Of {plural(len(model.epochs), 'epoch')}, number "
        f"{model.best_epoch} did best on {days(model.splits.validation)} and was kept.{energy}"
    )


def describe_judging(record: RunRecord) -> str:
    """The judging section in a paragraph."""
    report, splits = record.evaluation, record.model.splits
    later = report.window.start >= max(splits.train.end, splits.validation.end)
    seen = "which training never saw" if later else "not all later than what training saw"
    text = (
        f"Judged on {count(report.overall.num_rows)} rows of {days(report.window)}, "
        f"{seen}: {report.overall.primary_name} {estimate(report.overall.primary)}. The baseline "
        f"model is {report.baseline_model_name}."
    )
    told = [describe_comparison(c.against, c.primary) for c in comparisons(record)]
    return " ".join([text, *told, describe_skill(report)]).strip()


def comparisons(record: RunRecord) -> list[Comparison]:
    """The paired comparisons, with names that a reader knows."""
    return [
        c.model_copy(update={"against": c.against.replace("champion:", "champion, version ")})
        if c.against != "yardstick"
        else c.model_copy(update={"against": "baseline model"})
        for c in record.evaluation.comparisons
    ]


def describe_comparison(against: str, change: Metric) -> str:
    """One paired difference of the first metric as a sentence."""
    if not (is_shown(change.low) and is_shown(change.high)):
        meaning = "its interval could not be computed"
    elif change.low > 0:
        meaning = "the candidate is better"
    elif change.high < 0:
        meaning = "the candidate is worse"
    else:
        meaning = "these rows cannot tell the two apart"
    return f"Against the {against}: {difference(change)}, so {meaning}."


def describe_conversion(record: RunRecord) -> str:
    """The conversion section in a paragraph."""
    variants = record.variants
    if not variants:
        return "No variant was built in this run."
    kept = [v for v in variants if v.accepted]
    best = fastest_on_cpu(variants)
    text = f"{len(kept)} of {plural(len(variants), 'variant')} earned their place."
    if best is None:
        return text
    variant, latency = best
    return (
        f"{text} With one row at a time {variant.name} answers in {milliseconds(latency.p50_ms)}, "
        f"{factor(latency.ratio_to_eager)} of the time of PyTorch eager measured beside it."
    )


def describe_drift(record: RunRecord) -> str:
    """What the drift check compared, in a sentence."""
    drift = record.drift
    return (
        f"{plural(drift.num_current_rows, 'row')} of {days(drift.current)} against "
        f"{plural(drift.num_reference_rows, 'row')} of {days(drift.reference)}."
    )


def describe_promotion(record: RunRecord) -> str:
    """The promotion section in a sentence."""
    gates = record.promotion.gates
    if not gates:
        return "No gate was evaluated."
    passed = _num_passed(record.promotion)
    return f"{passed} of {plural(len(gates), 'gate')} passed. A gate without evidence stays closed."


def _num_passed(decision: PromotionDecision) -> int:
    return sum(gate.passed for gate in decision.gates)


def next_step(record: RunRecord) -> str:
    """What leads from the last stage back to the first."""
    return {
        DriftResult.STABLE: "stable: the next window starts the loop again",
        DriftResult.WATCH: "watch: the next window starts the loop again",
        DriftResult.RETRAIN: "drift advises to run the loop again now",
        DriftResult.DATA_FAULT: "data fault: mend the data, then run again",
    }[record.drift.result]


def shares_of_time(record: RunRecord) -> list[tuple[StageTime, float]]:
    """Stages that took time, each with its share of it."""
    timed = [s for s in record.stages if is_shown(s.seconds) and s.seconds > 0]
    total = sum(s.seconds for s in timed)
    return [(stage, stage.seconds / total) for stage in timed]


def slices_by_column(record: RunRecord) -> dict[str, list[SliceMetrics]]:
    """Slices of each column: numbers and dates in their own order, names from best to worst."""
    groups: dict[str, list[SliceMetrics]] = {}
    for part in record.evaluation.slices:
        groups.setdefault(part.column, []).append(part)
    for parts in groups.values():
        if all(_NATURAL_ORDER.fullmatch(p.value) for p in parts):
            parts.sort(key=lambda p: [int(n) for n in re.findall(r"\d+", p.value)])
        else:
            parts.sort(key=lambda p: _by_size(slice_rank(p.metrics)))
    return groups


def _by_size(value: float) -> tuple[bool, float]:
    return (not is_shown(value), -value if is_shown(value) else 0.0)


def features_by_drift(record: RunRecord) -> list[FeatureDrift]:
    """Drifted features first, each part from the largest effect down."""
    return sorted(record.drift.features, key=lambda f: (not f.drifted, _by_size(f.effect)))


def settings_of(config: Mapping[str, object]) -> list[tuple[str, str]]:
    """A nested configuration as rows: dotted name, value as JSON without quotes around words."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in _flat(config, "")
    ]


def _flat(config: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_rerun(record: RunRecord) -> str:
    """The command that does the whole run again, as far as the code is known."""
    commit, _, modified = record.code_commit.partition("-")
    command, remarks = "make run", []
    if describe_repo(record):
        remarks.append("FALAJ_FEATURE_REPO names the use case's feature repository")
    if re.fullmatch(r"[0-9a-f]{7,64}", commit):
        command = f"git checkout {commit} && make run"
        remarks += ["plus changes that were not committed"] * bool(modified)
    return f"{command}   # {'; '.join(remarks)}" if remarks else command


def describe_repo(record: RunRecord) -> str:
    """The argument by which a command finds the use case; empty for the default one."""
    return "" if record.use_case == DEFAULT_FEATURE_REPO.name else "--repo REPOSITORY "


def is_committed(record: RunRecord) -> bool:
    """Whether a commit alone names the code."""
    return re.fullmatch(r"[0-9a-f]{7,64}", record.code_commit) is not None


def limits(record: RunRecord) -> list[str]:
    """What the numbers on the page do not say."""
    report, drift = record.evaluation, record.drift
    found = [
        "Intervals are 95 % bootstrap intervals within one window. They hold the chance of the "
        "sample, not the change that a later season brings.",
        "Latencies were measured on the machine named above, beside PyTorch eager. Ratios travel "
        "to other machines better than milliseconds do.",
    ]
    if not is_committed(record):
        found.append(
            f"The code is not wholly named by a commit ({record.code_commit}): the run can be "
            "repeated only where that working tree still exists."
        )
    if report.skipped_slices:
        found.append(
            f"{plural(len(report.skipped_slices), 'slice')} held too few rows to be judged: "
            f"{', '.join(report.skipped_slices)}."
        )
    if drift.current_performance is None:
        found.append(
            "The current window has no labels yet: drift was judged by features and "
            f"{describe_outputs(record)} alone."
        )
    telemetry = record.model.telemetry
    if record.model.energy_j is None and (telemetry is None or telemetry.energy.joules is None):
        found.append("Energy is not reported: the machine offers no meter that could be read.")
    if not any(c.against.startswith("champion") for c in report.comparisons):
        found.append(
            "There was no champion to compare with; the baseline model is the only measure."
        )
    return found
