"""Commands that run flows: the whole loop, and each part of it that a person starts alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from falaj.context import (
    EXIT_DRIFT,
    EXIT_GATE,
    DryRun,
    End,
    Here,
    Last,
    Moment,
    Shown,
    Start,
    chosen_window,
    required_window,
    row,
)
from falaj.models import gate_lines
from falaj.session import run_flow
from flows.config import PipelineConfig, read_import_config
from tasks.contracts import release
from tasks.contracts.replay import PolicyName
from tasks.contracts.training import SearchResult
from tasks.kernel.errors import ConfigurationError, PromotionRefusedError, RegistryError
from tasks.kernel.extras import require_extras


def run(*, exit_code: bool = False, context: Here) -> Shown:
    """Run the whole loop once; it ends with a report.

    Args:
        exit_code: Exit with 5 where a gate refused the candidate.

    Examples:
        falaj run
        falaj run --exit-code --json > run.json
    """
    require_extras("train", "convert")

    def work(config: PipelineConfig) -> Shown:
        from flows.pipeline import pipeline_flow
        from flows.promotion import promotion_outcome

        record = pipeline_flow(config)
        judged, overall = record.evaluation, record.evaluation.overall
        accepted = ", ".join(v.name for v in record.variants if v.accepted) or "none"
        latest = context.settings.latest_report()
        lines = [
            "",
            row("Model", promotion_outcome(record.promotion)),
            f"{overall.primary_name:<10}{overall.primary:.4f} on {overall.num_rows:,} test rows; "
            f"{judged.baseline_model_name} {judged.baseline_model.primary.value:.4f}",
            row("Variants", accepted),
            row("Drift", f"{record.drift.result} in {record.drift.current}"),
            row("Report", latest / "report.html"),
            row("Facts", latest / "report.json"),
        ]
        refused = exit_code and record.promotion.closed
        return Shown(record, lines, EXIT_GATE if refused else 0)

    return run_flow(context, work, trains=True)


def train(*, context: Here) -> Shown:
    """Train, judge and register a candidate.

    Examples:
        falaj train
    """
    require_extras("train")

    def work(config: PipelineConfig) -> Shown:
        from flows.training import training_flow
        from tasks.reporting.facts import describe_cost

        trained = training_flow(config)
        version, model, store = trained.version, trained.model, context.settings.store
        lines = [row("Model", f"{version.name} version {version.version} is the candidate")]
        if model.telemetry is not None:
            lines.append(row("Training", describe_cost(model.telemetry)))
            if model.telemetry.diagnosis is not None:
                lines.append(row("Diagnosis", model.telemetry.diagnosis.summary))
        files = [store.path(artifact) for artifact in (model.log, *model.kept)]
        return Shown(trained, lines + [f"{file.name}: {file}" for file in files])

    return run_flow(context, work, trains=True)


def drift(
    start: Start | None = None,
    end: End | None = None,
    /,
    *,
    last: Last | None = None,
    served: bool = False,
    exit_code: bool = False,
    context: Here,
) -> Shown:
    """Compare one window with the training reference.

    Args:
        start: First moment, such as 2013-01-01T05:00Z; with --served the newest days without it.
        end: First moment after the window.
        last: The newest so long whose labels are known, by the use case's clock, such as 28d.
        served: Compare the served requests, from the prediction log, instead.
        exit_code: Exit with 6 where the result is another than `stable`.

    Examples:
        falaj drift 2013-11-01T05:00Z 2013-12-01T05:00Z
        falaj drift --last 28d --exit-code
        falaj drift --served
    """

    def work(config: PipelineConfig) -> Shown:
        from flows.drift_check import drift_check_flow, drift_check_log_flow
        from tasks.contracts.drift import DriftResult, TooFewPredictions

        window = chosen_window(start, end, last, config.clock, labelled=True)
        if served:
            found = drift_check_log_flow(window, config)
            if isinstance(found, TooFewPredictions):
                none = row("Drift", f"no drift result for {found.window}")
                return Shown(found, [none, found.reason])
        else:
            found = drift_check_flow(required_window(window, "drift"), config)
        if found is None:
            raise RegistryError(
                f"{config.registry.model_name} has no version to compare with; train a first one: "
                "`falaj run`"
            )
        lines = [row("Drift", f"{found.result} in {found.current}"), *found.evidence]
        is_found = exit_code and found.result is not DriftResult.STABLE
        return Shown(found, lines, EXIT_DRIFT if is_found else 0)

    if last is None and not (served and start is None):
        required_window(chosen_window(start, end, None), "drift")
    return run_flow(context, work)


def replay(
    *,
    policies: Annotated[list[PolicyName] | None, Parameter(consume_multiple=True)] = None,
    inject: str = "",
    permuted: NonNegativeInt = 0,
    tune: bool = False,
    start: Moment | None = None,
    held_out_from: Moment | None = None,
    seed: NonNegativeInt = 0,
    context: Here,
) -> Shown:
    """Replay the history under several policies; show what each would have gained and cost.

    Args:
        policies: Policies beside never, monthly, controller and oracle (default: all).
        inject: Faults, such as celsius@07-10,freeze@08-01:36h.
        permuted: Histories with their days in a random order, where nothing drifts.
        tune: Propose better bounds, found before the days that judge.
        start: First day (default: when a quarter of the history is over).
        held_out_from: First day that judges (default: the middle of the history).
        seed: Of the order of permuted days.

    Examples:
        falaj replay
        falaj replay --inject celsius@07-10,station-missing@02-10:7d --permuted 10
    """
    require_extras("train", "convert")
    from flows.replay.config import POLICIES, ReplayConfig
    from tasks.kernel.values import checked

    asked: dict[str, object] = {"policies": policies or POLICIES, "faults": inject}
    asked |= {"start": start, "held_out_from": held_out_from}
    asked |= {"permuted": permuted, "tune": tune, "seed": seed}
    wanted = checked(ReplayConfig, asked, "falaj replay", "Nothing was replayed")

    def work(config: PipelineConfig) -> Shown:
        from flows.replay.flow import replay_flow
        from tasks.reporting.replay_page import replay_lines

        result = replay_flow(config, wanted)
        page = context.settings.reports / "replay" / result.use_case / "replay.html"
        return Shown(result, ["", *replay_lines(result), row("Page", page)])

    return run_flow(context, work, trains=True)


def recalibrate(
    start: Start | None = None,
    end: End | None = None,
    /,
    *,
    last: Last | None = None,
    context: Here,
) -> Shown:
    """Fit the champion's calibrator on newer labels, without training.

    Args:
        start: First moment of the labels (default: the window `current` of the use case).
        end: First moment after them.
        last: The newest so long whose labels are known, by the use case's clock, such as 28d.

    Examples:
        falaj recalibrate --last 28d
    """

    def work(config: PipelineConfig) -> Shown:
        from flows.recalibration import recalibration_flow

        window = chosen_window(start, end, last, config.clock, labelled=True)
        result = recalibration_flow(window or config.current, config)
        return Shown(result, recalibration_lines(result))

    chosen_window(start, end, None)
    return run_flow(context, work)


def recalibration_lines(result: release.RecalibrationResult) -> list[str]:
    """The outcome, a line each: the map, what it changed, what became of the version."""
    from flows.promotion import promotion_outcome
    from tasks.evaluation.recalibration import describe_changes

    lines = [""]
    fit, source = result.fit.fit, result.source
    if fit is not None:
        lines.append(
            f"{'Map':<10}slope {fit.map.slope:.4f} ± {fit.slope_error:.4f}, intercept "
            f"{fit.map.intercept:+.4f} ± {fit.intercept_error:.4f}, fitted to {fit.num_rows:,} "
            f"rows of {fit.window}"
        )
    if result.evaluation is not None:
        changes = describe_changes(result.evaluation, source.version)
        lines += [row("Changes", line) for line in changes]
    if result.promotion is not None:
        return [*lines, row("Model", promotion_outcome(result.promotion))]
    left = f"{source.name} version {source.version} is left: {result.refusal}"
    return [*lines, row("Model", left)]


def search(
    *,
    trials: PositiveInt | None = None,
    parallel: PositiveInt | None = None,
    register: bool = False,
    context: Here,
) -> Shown:
    """Search for better training settings, in the search space of the use case.

    Args:
        trials: Trials of the study.
        parallel: Trials at the same time.
        register: Judge the best model and make it the candidate.

    Examples:
        falaj search --trials 30 --register
    """
    require_extras("train", "search")
    chosen = {"num_trials": trials, "parallel_trials": parallel}

    def work(config: PipelineConfig) -> Shown:
        from flows.training import search_flow

        changes = {name: value for name, value in chosen.items() if value is not None}
        settings = config.search.model_copy(update=changes)
        if not settings.space:
            raise ConfigurationError(
                "use_case.yaml has no search.space; name there the fields of the training "
                "configuration that may change, such as dropout: {kind: float, low: 0, high: 0.5}"
            )
        changed = config.model_copy(update={"search": settings})
        result = search_flow(changed, make_candidate=register)
        return Shown(result, _search_lines(result, context.home))

    return run_flow(context, work, trains=True)


def _search_lines(result: SearchResult, home: Path) -> list[str]:
    study, version = result.study, result.version
    best = next(trial for trial in study.trials if trial.number == study.best)
    states = [trial.state for trial in study.trials]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("complete", "pruned", "failed"))
    lines = [
        "",
        row("Study", f"{study.study}: {counts}; {study.ended_because}"),
        f"{'Best':<10}trial {best.number}, validation {study.quality_name} {best.quality:.4f}",
        *(row("", f"{name}: {value}") for name, value in best.point.items()),
        row("Page", home / result.page),
    ]
    if version is not None:
        lines.append(row("Model", f"{version.name} version {version.version} is the candidate"))
    return lines


def compress(
    *,
    version: int | None = None,
    method: Literal["pruning", "distillation", "pruning-distillation"] | None = None,
    context: Here,
) -> Shown:
    """Prune a version's network, or distil it to a small one; judge, convert, promote.

    Args:
        version: Version to compress (default: the champion).
        method: How (default: the use case's `compression`).

    Examples:
        falaj compress --version 3 --method distillation
    """
    require_extras("train", "convert")

    def work(config: PipelineConfig) -> Shown:
        from flows.compression import model_compression_flow
        from tasks.reporting.page import compression_path

        if method:
            chosen = config.compression.model_copy(update={"method": method})
            config = config.model_copy(update={"compression": chosen})
        result = model_compression_flow(config, version)
        path = compression_path(result, context.settings.reports)
        return Shown(result, [*compression_lines(result), row("Outcome", path)])

    return run_flow(context, work, trains=True)


def compression_lines(result: release.CompressionResult) -> list[str]:
    """The outcome, a line each: sizes, quality, whether the teacher helped, the version."""
    from flows.promotion import promotion_outcome

    made, judged = result.compression, result.judged
    lines = [
        "",
        f"{'Network':<10}{made.method} of {made.parent.name} version {made.parent.version}: "
        f"{result.num_parameters:,} of {made.parent_parameters:,} parameters, hidden layers "
        f"{'-'.join(map(str, result.hidden_sizes))} of {'-'.join(map(str, made.parent_sizes))}",
        f"{judged.parent.primary_name:<10}{judged.student.primary:.4f} on "
        f"{judged.student.num_rows:,} test rows; the large network {judged.parent.primary:.4f}",
    ]
    if judged.result:
        lines += [row("Teacher", judged.result), row("Choice", result.choice)]
    if result.promotion is not None:
        return [*lines, row("Model", promotion_outcome(result.promotion))]
    return [*lines, row("Model", f"version {made.parent.version} is left: {judged.refusal}")]


def import_model(file: Path, /, *, context: Here) -> Shown:
    """Register and convert a model trained elsewhere.

    Args:
        file: Its description, such as feature_repo/models/<name>.yaml.

    Examples:
        falaj import feature_repo/models/sentence-encoder.yaml
    """
    require_extras("convert")

    description = read_import_config(file)

    def work(config: PipelineConfig) -> Shown:
        from flows.conversion import model_import_flow

        result = model_import_flow(description)
        return Shown(result, list(import_lines(result)))

    return run_flow(context, work, reads_data=False)


def import_lines(result: release.ImportedModel) -> Iterator[str]:
    """The version, what became of each variant, and which one serves which goal, a line each."""
    version = result.version
    yield ""
    yield row("Model", f"{version.name} version {version.version}, {version.program_sha256[:12]}")
    yield from _variant_lines(result.variants)


def _variant_lines(variants: Sequence[release.ModelVariant]) -> Iterator[str]:
    for variant in variants:
        yield f"{variant.name:<22}{variant.reason}"
    for variant in variants:
        for goal in variant.standings:
            if goal.chosen:
                yield row("Goal", f"{goal.goal}: {variant.name}, {goal.reason}")


def convert(version: PositiveInt | None = None, /, *, context: Here) -> Shown:
    """Build, judge and file the variants of a registered version again.

    Args:
        version: Of the use case's model (default: the champion, else the candidate).

    Examples:
        falaj convert
        falaj convert 3
    """

    def work(config: PipelineConfig) -> Shown:
        from flows.conversion import reconversion_flow

        variants = reconversion_flow(version, config)
        return Shown(variants, list(_variant_lines(variants)))

    return run_flow(context, work)


def promote(version: PositiveInt, /, *, dry_run: DryRun = False, context: Here) -> Shown:
    """Take a registered version through all gates; where they are open, it is the champion.

    Where the use case wants a person's consent, the version waits for it.

    Args:
        version: Of the use case's model.

    Raises:
        RegistryError: there is no such version, or its files are missing or damaged.
        PromotionRefusedError: a gate is closed.

    Examples:
        falaj promote 3 --dry-run
        falaj promote 3
    """

    def work(config: PipelineConfig) -> Shown:
        from flows.promotion import promotion_outcome, version_promotion_flow

        decision = version_promotion_flow(version, config, only_judge=dry_run)
        gates = gate_lines(decision)
        if decision.closed and not dry_run:
            raise PromotionRefusedError("\n".join([promotion_outcome(decision), *gates]))
        would = "would be refused" if decision.closed else "would pass all gates"
        outcome = f"version {version} {would}" if dry_run else promotion_outcome(decision)
        code = EXIT_GATE if decision.closed else 0
        return Shown(decision, [*gates, row("Model", outcome)], code)

    return run_flow(context, work)


def retry(run: str | None = None, /, *, context: Here) -> Shown:
    """Resume a failed or killed loop at the stage that failed.

    Args:
        run: Its name or the beginning of its id (default: the newest loop that failed).

    Examples:
        falaj retry
    """

    def work(config: PipelineConfig) -> Shown:
        from infra.orchestration.retry import retry_run

        lines = retry_run(run)
        return Shown({"lines": lines}, lines)

    return run_flow(context, work, reads_data=False)
