"""What a replay shows: quality of what each policy served, regret, cost, and a recommendation."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from flows.replay.history import History, ReplayModel, priced
from flows.replay.models import Candidate
from flows.replay.walk import Reigning, Spending, Walk
from tasks.contracts.base import Artifact, TimeWindow
from tasks.contracts.evaluation import Metric
from tasks.contracts.replay import (
    PolicyName,
    PolicyQuality,
    PolicyResult,
    Reign,
    ReplayedAct,
    ReplayedModel,
    Sighting,
    WeekQuality,
)
from tasks.contracts.telemetry import ResourceUse
from tasks.evaluation.metrics import UNBOUNDED, metric_of, primary_metric, why_not_judged
from tasks.evaluation.scoring import SCORE
from tasks.kernel.settings import StagedFolder, content_key
from tasks.reporting.quantities import plural

ORACLE_DAYS = timedelta(days=28)
"""The oracle chooses anew so often: shorter stretches would reward luck."""
DAY, WEEK = timedelta(days=1), timedelta(days=7)
ENOUGH = 0.001
"""AUC or R2 that nobody would pay for."""
Scores = NDArray[np.float32]
Drawn = tuple[float, NDArray[np.float64]]


def served(history: History, walk: Walk, window: TimeWindow) -> Scores:
    """The scores that a policy served in a window, shape (rows, 1) or (rows, classes)."""
    ends = [reign.since for reign in walk.reigns[1:]] + [window.end]
    found = np.full_like(history.scores(walk.reigns[0].model)[history.part(window)], np.nan)
    first = history.part(window).start
    for reign, end in zip(walk.reigns, ends, strict=True):
        start, end = max(reign.since, window.start), min(end, window.end)
        if reign is walk.reigns[0]:
            start = window.start
        if start < end:
            part = history.part(TimeWindow(start=start, end=end))
            found[part.start - first : part.stop - first] = history.scores(reign.model)[part]
    return found


def quality_of(
    history: History, walk: Walk, window: TimeWindow, *, replicates: bool = True
) -> Drawn:
    """AUC or R2 of what a policy served in a window, and the same on draws of its days."""
    rows = history.with_scores(served(history, walk, window), window)
    return primary_metric(rows, history.columns, SCORE, replicates=replicates)


def spent_in(walk: Walk, window: TimeWindow) -> list[Spending]:
    """What a policy took in a window."""
    return [spending for spending in walk.spent if window.start <= spending.at < window.end]


def oracle(history: History, walks: Sequence[Walk], days: Sequence[datetime]) -> Walk:
    """The best in hindsight: every four weeks the best of all models that were made by then."""
    made = {c.model.program.sha256: c for walk in walks for c in walk.made}
    models = {walk.reigns[0].model.program.sha256: walk.reigns[0].model for walk in walks}
    models |= {sha: candidate.model for sha, candidate in made.items()}
    reigns: list[Reigning] = []
    start, end = days[0], history.config.window.end
    while start < end:
        window = TimeWindow(start=start, end=min(start + ORACLE_DAYS, end))
        known = [model for model in models.values() if model.made <= start]
        best = max(known, key=lambda model: _quality_in(history, model, window))
        if not reigns or reigns[-1].model != best:
            reigns.append(Reigning(since=start, model=best))
        start += ORACLE_DAYS
    used = {reign.model.program.sha256 for reign in reigns}
    spent = [
        Spending(at=c.model.made, use=c.use, training=c.model.is_trained)
        for c in (made[sha] for sha in sorted(used & made.keys()))
    ]
    return Walk(policy="oracle", reigns=tuple(reigns), acts=(), made=(), spent=tuple(spent))


def _quality_in(history: History, model: ReplayModel, window: TimeWindow) -> float:
    rows = history.scored(model, window)
    if why_not_judged(rows, history.columns, history.config.evaluation):
        return -model.number  # nothing is known: the oldest
    return primary_metric(rows, history.columns, SCORE, replicates=False)[0]


def qualities(
    history: History, walks: Mapping[PolicyName, Walk], window: TimeWindow
) -> dict[PolicyName, PolicyQuality]:
    """Quality of each policy in one part of the history, all on the same draws of days."""
    drawn = {name: quality_of(history, walk, window) for name, walk in walks.items()}
    return {name: _quality(walk, window, drawn[name], drawn) for name, walk in walks.items()}


def _quality(
    walk: Walk, window: TimeWindow, own: Drawn, drawn: Mapping[PolicyName, Drawn]
) -> PolicyQuality:
    spent = spent_in(walk, window)
    use = sum((priced(spending.use) for spending in spent), priced(ResourceUse()))
    gain, hours = minus(own, drawn["never"]), use.cpu_s / 3600
    return PolicyQuality(
        window=window,
        quality=metric_of(*own, UNBOUNDED),
        to_never=gain,
        to_monthly=minus(own, drawn["monthly"]),
        to_controller=minus(own, drawn["controller"]),
        regret=minus(drawn["oracle"], own),
        num_trainings=sum(spending.training for spending in spent),
        training_cpu_s=sum(spending.use.cpu_s for spending in spent if spending.training),
        use=use,
        gain_per_cpu_hour=None if hours == 0 else scaled(gain, 1 / hours),
    )


def minus(one: Drawn, other: Drawn) -> Metric:
    """A difference with its interval, on the same draws."""
    return metric_of(one[0] - other[0], one[1] - other[1], UNBOUNDED)


def scaled(metric: Metric, factor: float) -> Metric:
    """A metric in another unit; the factor is above 0."""
    return Metric(value=metric.value * factor, low=metric.low * factor, high=metric.high * factor)


def policy_result(
    history: History, walk: Walk, tuned_on: PolicyQuality, held_out: PolicyQuality
) -> PolicyResult:
    """All that is shown of one policy."""
    ends = [*(reign.since for reign in walk.reigns[1:]), held_out.window.end]
    return PolicyResult(
        policy=walk.policy,
        reigns=tuple(
            Reign(window=TimeWindow(start=reign.since, end=end), model=reign.model.number)
            for reign, end in zip(walk.reigns, ends, strict=True)
        ),
        acts=walk.acts,
        tuned_on=tuned_on,
        held_out=held_out,
        weeks=tuple(_weeks(history, walk, tuned_on.window.start, held_out.window.end)),
    )


def _weeks(history: History, walk: Walk, start: datetime, end: datetime) -> list[WeekQuality]:
    found, begin = [], history.local(start)  # a week may have an hour more or less
    while (begin + WEEK).astimezone(UTC) <= end:
        window = TimeWindow(start=begin.astimezone(UTC), end=(begin + WEEK).astimezone(UTC))
        rows = history.with_scores(served(history, walk, window), window)
        known = not why_not_judged(rows, history.columns, history.config.evaluation)
        value = primary_metric(rows, history.columns, SCORE, replicates=False)[0] if known else None
        found.append(WeekQuality(start=begin.date(), quality=value))
        begin += WEEK
    return found


def replayed_models(first: Candidate, walks: Sequence[Walk]) -> tuple[ReplayedModel, ...]:
    """All models, each once, in order of the moments at which they were made."""
    made = {c.model.program.sha256: c for c in (first, *(c for w in walks for c in w.made))}
    return tuple(
        ReplayedModel(
            number=c.model.number,
            made=c.model.made,
            kind="training" if c.model.is_trained else "recalibration",
            splits=c.model.splits,
            program_sha256=c.model.program.sha256,
            quality=c.evaluation.overall.primary,
            use=priced(c.use),
        )
        for c in sorted(made.values(), key=lambda c: (c.model.made, c.model.number))
    )


def more_acts(acts: Sequence[ReplayedAct], usual: Sequence[ReplayedAct]) -> list[ReplayedAct]:
    """Acts of which there are more by their moment than usual: one that came earlier is one."""

    def num_until(act: ReplayedAct, among: Sequence[ReplayedAct]) -> int:
        return sum(other.action == act.action and other.at <= act.at for other in among)

    return [act for act in acts if num_until(act, acts) > num_until(act, usual)]


def answered(
    seen: Sequence[Sighting], acts: Sequence[ReplayedAct], start: datetime
) -> dict[str, str]:
    """Answer and verdict on a fault, from what noticed it and what was done because of it."""
    done = {act.action for act in acts}
    refused = any(s.by in ("validation of rows", "validation of features") for s in seen)
    noticed = min((s.at for s in seen), default=None)
    answer = "rows refused" if refused else "alert" if seen else "nothing"
    answer = next((a for a in ("roll_back", "recalibrate", "retrain") if a in done), answer)
    verdict = "missed" if noticed is None else "right"
    if noticed is not None and noticed - start > DAY:
        verdict = "late"
    if "retrain" in done:
        answer, verdict = "retrain", "wrong"
    return {"answer": answer.replace("_", " "), "verdict": verdict}


def keep_scores(history: History, walks: Mapping[PolicyName, Walk], window: TimeWindow) -> Artifact:
    """File of what each policy served, from which every figure can be computed again."""
    key = content_key("scores-of-policies", history.identity, window, list(walks.values()))

    def build(folder: StagedFolder) -> Artifact:
        rows = history.rows[history.part(window)]
        for name, walk in walks.items():
            scores = served(history, walk, window)
            columns = history.columns.score_columns(name)
            rows = rows.assign(**dict(zip(columns, scores.T, strict=True)))
        rows.to_parquet(folder.path / "scores.parquet", index=False)
        return folder.artifact("scores.parquet")

    return history.store.build_once("replays", key, Artifact, build)


def recommended(
    results: Mapping[PolicyName, PolicyQuality], quality_name: str
) -> tuple[PolicyName, str]:
    """The cheapest policy whose quality is the best but for what nobody would pay for."""
    real = {n: r for n, r in results.items() if n != "oracle" and np.isfinite(r.quality.value)}
    best = max(result.quality.value for result in real.values())
    good = [name for name, result in real.items() if result.quality.value >= best - ENOUGH]
    chosen = min(good, key=lambda name: (real[name].num_trainings, real[name].use.cpu_s))
    own, monthly, controller = real[chosen], real["monthly"], real["controller"]
    sentence = (
        f"Run {chosen}: {quality_name} {own.quality:.4f} on the days that judge, "
        f"{own.to_never:+.4f} to never retraining and {own.to_monthly:+.4f} to monthly, with "
        f"{plural(own.num_trainings, 'training')} (monthly {monthly.num_trainings}) and "
        f"{own.use.cpu_s / 3600:.2f} CPU hours (monthly {monthly.use.cpu_s / 3600:.2f})."
    )
    if chosen != "controller":
        sentence += (
            f" The controller does not win here: {quality_name} of {chosen} minus its own is "
            f"{own.to_controller:+.4f}, with {plural(controller.num_trainings, 'training')} and "
            f"{controller.use.cpu_s / 3600:.2f} CPU hours."
        )
    return chosen, sentence
