"""What was observed of two versions, turned into findings that hold at any moment."""

from collections.abc import Mapping, Set
from datetime import timedelta

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tasks.contracts.rollout import Evidence, Finding, MetricName, Period, Tally
from tasks.release import measures
from tasks.release.config import (
    ALPHA,
    SPLIT_ALPHA,
    TOLERATED_ERROR_RATIO,
    TOLERATED_SLOW_RATIO,
    ReleaseConfig,
)
from tasks.release.evidence import CANDIDATE, KEY, SHADOW, STABLE, Observed
from tasks.release.records import Release
from tasks.stats.sequential import final_log_wealth, mean_bounds

CHANCES: Mapping[str, float] = ALPHA._asdict()
NUM_BASE = 1000
"""Requests of the stable version that say what is slow; they are not compared."""
SLOW_QUANTILE, SLOW_FACTOR = 0.95, 1.2
"""Slow is what takes longer than so many times this quantile of them."""
HALF = 0.5
MAX_ERRORS_ALONE = 0.05
"""Share of failed requests that a candidate may have which answers everything."""
FAULT_MINUTES = 15
"""A fault common to both versions is looked for in so many last minutes."""
MIN_FAULT_REQUESTS = 50
MAX_COMMON_ERRORS = 0.1
"""Share of the stable version's requests that fail, beyond which what both depend on is broken."""
MAX_STABLE_SHIFT = 0.2
"""Gap between the stable version's scores at first and now, beyond which the inputs changed."""


def compare(observed: Observed, release: Release) -> Evidence:
    """Every metric of one evaluation cycle.

    Args:
        observed: rows and labels of the release.
        release: its periods and configuration.
    """
    config = release.config
    number = len(release.periods) - 1
    split_fault = _split_fault(observed, release)
    findings = [
        _errors(observed, release, is_split_right=not split_fault),
        _latency(observed, release),
        _scores(observed, release),
        *_task(observed, release),
    ]
    return Evidence(
        seen_until=observed.seen_until,
        findings=tuple(finding for finding in findings if finding is not None),
        stable=_tally(observed, STABLE, config),
        candidate=_tally(observed, CANDIDATE, config),
        shadow=_tally(observed, SHADOW, config),
        step_requests=sum(
            len(_asked(observed.requests(who, number))) for who in (CANDIDATE, SHADOW)
        ),
        num_labels=sum(len(observed.labelled(who)) for who in (CANDIDATE, SHADOW)),
        faults=_common_faults(observed),
        split_fault=split_fault,
    )


def _errors(observed: Observed, release: Release, *, is_split_right: bool) -> Finding:
    alone = _alone(observed, release)
    strata = _strata(observed, release, "failed", is_split_right=is_split_right)
    return _of_counts("errors", strata, alone, TOLERATED_ERROR_RATIO)


def _latency(observed: Observed, release: Release) -> Finding | None:
    marked = _with_slow(observed)
    if marked is None:
        return None
    strata = _strata(marked, release, "slow", is_split_right=True)
    return _of_counts("latency", strata, [], TOLERATED_SLOW_RATIO)


def _of_counts(
    metric: MetricName,
    strata: list[measures.Stratum],
    alone: list[measures.Stratum],
    tolerated: float,
) -> Finding:
    """A finding on whose events they are; `alone` are those judged by a fixed bound."""
    alpha = CHANCES[metric]
    evidence = float(measures.log_ratio_evidence(strata, tolerated))
    if alone:  # half of the chance each
        evidence = float(np.logaddexp(evidence, measures.log_ratio_evidence(alone)) - np.log(2))
    events, mine = sum(s.total for s in strata), sum(s.candidate for s in strata)
    low, high = measures.ratio_bounds(strata, alpha) if strata else (0.0, float("inf"))
    sentence = (
        f"{mine:,} of {events:,} events that count are the candidate's: at least {low:.3g} times "
        f"as often as the stable version's, {tolerated:g} times are tolerated"
    )
    if alone:
        failed, total = sum(s.candidate for s in alone), sum(s.total for s in alone)
        sentence += f"; {failed:,} of {total:,} requests failed that it answered alone"
    theirs = sum((s.total - s.candidate) / (1 - s.share) for s in strata)
    expected = sum(s.candidate / s.share for s in strata)
    return Finding(
        metric=metric,
        log_evidence=evidence,
        alpha=alpha,
        estimate=float(expected / theirs) if theirs else None,
        low=low,
        high=high if np.isfinite(high) else None,
        num=events,
        unit="times as often as the stable version",
        is_harm=bool(evidence >= np.log(1 / alpha)),
        sentence=sentence,
    )


def _strata(
    observed: Observed, release: Release, event: str, *, is_split_right: bool
) -> list[measures.Stratum]:
    """Events of each period: of pairs that differ, or of requests that were split.

    A client that sticks to its version does so in all periods, so it counts in the first one only.
    """
    found: list[measures.Stratum] = []
    counted: set[str] = set()
    for number, period in enumerate(release.periods):
        if period.is_split:
            found.append(_split_stratum(observed, number, period, event, counted, is_split_right))
        elif period.shares.mirror:
            found.append(_paired_stratum(observed, number, event))
    return [stratum for stratum in found if stratum.total]


def _paired_stratum(observed: Observed, number: int, event: str) -> measures.Stratum:
    """Pairs of which one alone shows the event: alike versions are it equally often (McNemar).

    Copies are computed after all others, so they come in larger batches, which take longer: times
    are compared where both batches had equally many rows, and of each batch once.
    """
    column = "slow_compute" if event == "slow" else event
    pairs = _asked(observed.requests(STABLE, number)).merge(
        _asked(observed.requests(SHADOW, number)), on="request", suffixes=("", "_copy")
    )
    if event == "slow":
        pairs = _one_of_each_batch(pairs[pairs["batch_rows"] == pairs["batch_rows_copy"]])
    first, copy = (pairs[name].to_numpy(dtype=bool) for name in (column, f"{column}_copy"))
    return measures.Stratum(int((copy & ~first).sum()), int((copy ^ first).sum()), HALF)


def _one_of_each_batch(pairs: pd.DataFrame) -> pd.DataFrame:
    """Pairs of which no two share a batch: what slows a batch slows all requests in it at once."""
    batches = pairs.assign(batch=_batches(pairs, ""), batch_copy=_batches(pairs, "_copy"))
    return batches.drop_duplicates("batch").drop_duplicates("batch_copy")


def _batches(pairs: pd.DataFrame, suffix: str) -> NDArray[np.int64]:
    """A number for the batch in which each request was computed.

    Requests of one batch took one time and ended in one moment, up to the grain of the log. Two
    batches that took equally long ended at least as far apart, for one follows the other.
    """
    took, rows, latency = (
        pairs[f"{name}{suffix}"].to_numpy(dtype=float)
        for name in ("compute_us", "batch_rows", "latency_us")
    )
    arrived = pairs[f"event_timestamp{suffix}"]
    ended = ((arrived - arrived.min()) / pd.Timedelta(microseconds=1)).to_numpy(float) + latency
    order = np.lexsort((ended, took, rows))
    took, rows, ended = took[order], rows[order], ended[order]
    is_other = (np.diff(took) != 0) | (np.diff(rows) != 0) | (np.diff(ended) > took[1:] / 2)
    is_first = np.concatenate([np.ones(min(len(order), 1), dtype=bool), is_other])
    number = np.arange(len(order))
    since = number - np.maximum.accumulate(np.where(is_first, number, 0))
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.cumsum(is_first | (since % np.maximum(rows, 1) == 0))  # none holds more
    return found


def _asked(requests: pd.DataFrame) -> pd.DataFrame:
    """Those that a version answered or failed; others were refused before, or dropped copies."""
    return requests[requests["error"].isna() | requests["failed"].astype(bool)]


def _split_stratum(
    observed: Observed,
    number: int,
    period: Period,
    event: str,
    counted: set[str],
    is_split_right: bool,
) -> measures.Stratum:
    """Events of split requests; where clients stick to a version, each client counts once."""
    requests = [observed.requests(who, number) for who in (CANDIDATE, STABLE)]
    sticking = _sticking(requests) if period.shares.sticky else set()
    events = [rows[rows[event].astype(bool)] for rows in requests]
    mine, theirs = (_units(rows, sticking, counted) for rows in events)
    for rows in events:
        counted |= sticking & set(_names(rows))
    share = period.shares.candidate / 100
    if not is_split_right:  # the candidate may have got more than was asked: no harm of its own
        seen = len(requests[0]) / max(sum(map(len, requests)), 1)
        share = float(np.clip(max(share, seen), 1e-6, 1 - 1e-6))
    return measures.Stratum(mine, mine + theirs, share)


def _names(requests: pd.DataFrame) -> pd.Series:
    return requests["subject"].fillna("").astype(str)


def _sticking(requests: list[pd.DataFrame]) -> set[str]:
    """Clients that are known by name and met one version only."""
    mine, theirs = (set(_names(rows)) for rows in requests)
    return (mine ^ theirs) - {""}


def _units(requests: pd.DataFrame, sticking: Set[str], counted: Set[str] = frozenset()) -> int:
    """Clients that stick to a version and were not counted before, and requests of all others."""
    names = _names(requests)
    sticks = names.isin(sticking)
    return len(set(names[sticks]) - counted) + int((~sticks).sum())


def _alone(observed: Observed, release: Release) -> list[measures.Stratum]:
    """Requests that the candidate answered with nothing to compare with, against a fixed bound."""
    found = []
    for number, period in enumerate(release.periods):
        if not period.split or period.shares.candidate == 100:
            requests = observed.requests(CANDIDATE, number)
            failed = int(requests["failed_surely"].sum())
            found.append(measures.Stratum(failed, len(requests), MAX_ERRORS_ALONE))
    return [stratum for stratum in found if stratum.total]


def _with_slow(observed: Observed) -> Observed | None:
    """The rows after the first thousand of the stable version, with columns `slow`.

    Split requests are judged by their whole time. A copy arrives when its original has been queued
    already, so pairs are judged by the model's own time: column `slow_compute`.
    """
    times = ["latency_us", "compute_us"]
    base = observed.requests(STABLE).dropna(subset=times)
    base = base[~base["failed"]].head(NUM_BASE)
    if len(base) < NUM_BASE:
        return None
    rows = observed.rows[observed.rows["event_timestamp"] > base["event_timestamp"].iloc[-1]]
    is_slow = rows[times] > base[times].quantile(SLOW_QUANTILE) * SLOW_FACTOR
    whole, own = (is_slow[name] & ~rows["failed"] for name in times)
    marked = rows.assign(slow=whole, slow_compute=own)
    return Observed(marked, observed.labels, observed.seen_until)


def _scores(observed: Observed, release: Release) -> Finding | None:
    """Distance of the score distributions in the current period alone: others had other inputs."""
    tolerated, number = release.config.max_score_shift, len(release.periods) - 1
    alpha = ALPHA.scores / (2 * len(release.steps))
    mine = _score_values(observed, SHADOW, number), _score_values(observed, CANDIDATE, number)
    theirs = _score_values(observed, STABLE, number)
    candidates = max(mine, key=len)
    if not len(candidates) or not len(theirs):
        return None
    low, seen, high = measures.distance_bounds(theirs, candidates, alpha)
    return Finding(
        metric="scores",
        log_evidence=float(np.log(1 / alpha)) if low > tolerated else 0.0,
        alpha=alpha,
        estimate=seen,
        low=low,
        high=high,
        num=len(candidates),
        unit="largest gap of the distributions",
        is_harm=low > tolerated,
        sentence=f"scores of {len(candidates):,} and {len(theirs):,} rows lie {seen:.3f} apart, at "
        f"least {low:.3f}; {tolerated:g} is tolerated",
    )


def _score_values(observed: Observed, who: str, number: int) -> measures.FloatArray:
    values: measures.FloatArray = observed.of(who, number)["score"].dropna().to_numpy(dtype=float)
    return values[np.isfinite(values)]


def _task(observed: Observed, release: Release) -> list[Finding | None]:
    config = release.config
    pairs = observed.labelled(STABLE).merge(
        observed.labelled(SHADOW)[[*KEY, "score"]], on=KEY, suffixes=("", "_copy")
    )
    arrays = [pairs[name].to_numpy(dtype=float) for name in ("label", "score", "score_copy")]
    losses_of = measures.paired_auc_losses if config.ranks else measures.paired_error_losses
    paired = losses_of(*arrays)
    return [_of_losses("task_paired", paired, len(pairs), config), _task_split(observed, release)]


def _task_split(observed: Observed, release: Release) -> Finding | None:
    """All periods in which requests were split, one after the other: one wealth goes through them.

    Each version is judged on rows of its own, so this sees far less than pairs do.
    """
    config = release.config
    losses_of = measures.unpaired_auc_losses if config.ranks else measures.unpaired_error_losses
    values, num_rows = [np.empty(0)], 0
    for number, period in enumerate(release.periods):
        if not period.is_split:
            continue
        stable, candidate = (
            measures.Labelled(rows["label"].to_numpy(float), rows["score"].to_numpy(float))
            for rows in (observed.labelled(STABLE, number), observed.labelled(CANDIDATE, number))
        )
        values.append(losses_of(stable, candidate, period.shares.candidate / 100))
        num_rows += len(candidate)
    return _of_losses("task_split", np.concatenate(values), num_rows, config)


def _of_losses(
    metric: MetricName, values: measures.FloatArray, num_rows: int, config: ReleaseConfig
) -> Finding | None:
    if not len(values):
        return None
    evidence, alpha = final_log_wealth(values), CHANCES[metric]
    low, high = mean_bounds(values, alpha)
    what = "AUC" if config.ranks else "absolute error, in six medians"
    loss = float(values.mean())
    return Finding(
        metric=metric,
        log_evidence=evidence,
        alpha=alpha,
        estimate=loss,
        low=low,
        high=high,
        num=num_rows,
        unit=f"loss of {what}",
        is_harm=bool(evidence >= np.log(1 / alpha)),
        sentence=f"on {num_rows:,} labelled rows the candidate loses {loss:+.4f} {what}, between "
        f"{low:+.4f} and {high:+.4f} at any moment",
    )


def _split_fault(observed: Observed, release: Release) -> str:
    """A sentence where requests are not split as asked."""
    for number, period in enumerate(release.periods):
        if not period.is_split:
            continue
        requests = [observed.requests(who, number) for who in (CANDIDATE, STABLE)]
        sticking = _sticking(requests) if period.shares.sticky else set()
        counts = [_units(rows, sticking) for rows in requests]
        share, total = period.shares.candidate / 100, sum(counts)
        alpha = SPLIT_ALPHA / len(release.steps)
        if total and measures.log_split_evidence(counts[0], total, share) >= np.log(1 / alpha):
            return (
                f"the candidate got {counts[0]:,} of {total:,} in step "
                f"{release.steps[period.step].name}, {counts[0] / total:.1%} where {share:.1%} was "
                "asked; the two groups cannot be compared"
            )
    return ""


def _common_faults(observed: Observed) -> tuple[str, ...]:
    """Sentences on what is wrong with the stable version too, in the last minutes."""
    since = pd.Timestamp(observed.seen_until - timedelta(minutes=FAULT_MINUTES))
    rows = observed.of(STABLE)
    late = rows[rows["event_timestamp"] >= since]
    requests = late.drop_duplicates("request")
    found = []
    failed = requests["failed_surely"].mean() if len(requests) >= MIN_FAULT_REQUESTS else 0.0
    if failed > MAX_COMMON_ERRORS:
        found.append(
            f"{failed:.1%} of the stable version's requests failed in the last "
            f"{FAULT_MINUTES} minutes; something that both versions depend on is broken"
        )
    before, now = (part["score"].dropna() for part in (rows.head(10 * NUM_BASE), late))
    before = before[~before.index.isin(now.index)]
    low, _, _ = measures.distance_bounds(before.to_numpy(float), now.to_numpy(float), ALPHA.scores)
    if len(before) and len(now) and low > MAX_STABLE_SHIFT:
        found.append(
            f"the stable version's own scores lie at least {low:.2f} from those of before; the "
            "inputs have changed for both versions"
        )
    return tuple(found)


def _tally(observed: Observed, who: str, config: ReleaseConfig) -> Tally:
    requests, labelled = observed.requests(who), observed.labelled(who)
    times = requests["latency_us"].dropna().to_numpy(dtype=float) / 1000
    labels, of_labelled = (labelled[name].to_numpy(dtype=float) for name in ("label", "score"))
    metric = measures.auc(labels, of_labelled) if config.ranks else _error(labels, of_labelled)
    return Tally(
        num_requests=len(requests),
        num_failed=int(requests["failed"].sum()),
        num_labelled=len(labelled),
        latency_p50_ms=float(np.quantile(times, 0.5)) if len(times) else None,
        latency_p99_ms=float(np.quantile(times, 0.99)) if len(times) else None,
        task_metric=metric if np.isfinite(metric) else None,
    )


def _error(labels: measures.FloatArray, scores: measures.FloatArray) -> float:
    return float(np.abs(labels - scores).mean()) if len(labels) else float("nan")
