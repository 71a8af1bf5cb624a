"""How often a release is rolled back: of alike versions, and of worse ones before 20,000 labels.

Every simulated release is looked at after each labelled unit and after each thousand requests, with
the tests of `tasks.release` and their chances. Scores are binormal with an AUC of 0.75 (0.7275
where worse), one request in five is positive; "correlated 0.8" is the correlation of two versions'
scores within a class, as two trainings of one model have it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from infra.bench.figures import Measured, at_least, at_most, reported
from infra.bench.parts import Bench
from tasks.release.config import ALPHA, ReleaseConfig
from tasks.release.measures import Stratum, log_ratio_evidence, radius, unit_aucs, unit_ends
from tasks.stats.sequential import log_wealth

FloatArray = NDArray[Any]
NUM_LABELS = 20_000
NUM_AT_ONCE = 250
NUM_LOOKS = 20
AUC, WORSE_AUC = 0.75, 0.75 * 0.97
CONFIG = ReleaseConfig()
CORRELATIONS = (0.95, 0.9, 0.8, 0.7)


@dataclass(frozen=True)
class Sample:
    """Scores of both versions for the same rows.

    Attributes:
        labels: shape (rows,).
        stable: scores, shape (cases, rows); `candidate` likewise.
    """

    labels: FloatArray
    stable: FloatArray
    candidate: FloatArray


def figures(bench: Bench) -> Measured:
    """Wrong roll backs, and right ones in time."""
    return [*_alike(bench.size(10_000, NUM_AT_ONCE)), *_worse(bench.size(2_000, NUM_AT_ONCE))]


def _alike(num_alike: int) -> Measured:
    """Mirrored, then split 5, 25 and 50 to 100: every test at every look, any of them."""
    rng = np.random.default_rng(7)
    reasons = np.zeros((4, num_alike), dtype=bool)
    for start in range(0, num_alike, NUM_AT_ONCE):
        part = slice(start, start + NUM_AT_ONCE)
        sample = draw(rng, NUM_AT_ONCE, AUC, correlation=float(rng.choice(CORRELATIONS)))
        reasons[0, part] = _paired_acts(sample).any(axis=-1)
        reasons[1, part] = _scores_act(sample)
    reasons[2] = _events_act(rng, 0.01, ALPHA.errors, num_alike)
    reasons[3] = _events_act(rng, 0.03, ALPHA.latency, num_alike)
    shares = reasons.mean(axis=1)
    evidence = ", ".join(
        f"{name} {share:.2%}"
        for name, share in zip(("AUC", "scores", "errors", "latency"), shares, strict=True)
    )
    rate = float(reasons.any(axis=0).mean())
    releases = f"{num_alike:,} releases, {NUM_LABELS:,} labels, nothing tolerated; {evidence}"
    return [at_most("alike versions rolled back at any look", rate, 0.05, releases)]


def _worse(num_worse: int) -> Measured:
    rng = np.random.default_rng(8)
    measured: Measured = []
    for correlation in CORRELATIONS:
        acted, median = _share_acted(rng, correlation, num_worse)
        name = f"3 % worse AUC found, mirrored, correlated {correlation:g}"
        releases = f"{num_worse:,} releases, before {NUM_LABELS:,} labels"
        evidence = f"{releases}; half of them by {median:,}"
        measured.append(at_least(name, acted, 0.95, evidence))
    acted, median = _share_acted(rng, 0.5, num_worse)
    measured.append(reported("the same, correlated 0.5", acted, f"half of them by {median:,}"))
    acted = _share_acted_split(rng, num_worse)
    measured.append(reported("the same, half and half, no mirror", acted, "each its own rows"))
    return measured


def _share_acted(rng: np.random.Generator, correlation: float, num_worse: int) -> tuple[float, int]:
    """Share of worse versions that are rolled back, and labels after which half of them are."""
    when = []
    for _ in range(num_worse // NUM_AT_ONCE):
        sample = draw(rng, NUM_AT_ONCE, WORSE_AUC, correlation)
        acts = _paired_acts(sample)
        ends = np.array(unit_ends(sample.labels))
        when += np.where(acts.any(axis=-1), ends[acts.argmax(axis=-1)], np.iinfo(int).max).tolist()
    return float(np.mean(np.array(when) < NUM_LABELS)), int(np.median(when))


def _share_acted_split(rng: np.random.Generator, num_worse: int) -> float:
    """Each version on half of the rows."""
    alpha, half = ALPHA.task_split, NUM_LABELS // 2
    acted = []
    for _ in range(num_worse // NUM_AT_ONCE):
        one, other = (draw(rng, NUM_AT_ONCE, WORSE_AUC, 0.0, half) for _ in range(2))
        stable = unit_aucs(one.labels, one.stable)
        candidate = unit_aucs(other.labels, other.candidate)
        units = min(stable.shape[-1], candidate.shape[-1])
        wealth = log_wealth(stable[:, :units] - candidate[:, :units])
        acted.append((wealth >= np.log(1 / alpha)).any(axis=-1))
    return float(np.concatenate(acted).mean())


def draw(
    rng: np.random.Generator,
    cases: int,
    candidate_auc: float,
    correlation: float,
    num_rows: int = NUM_LABELS,
) -> Sample:
    """Scores of two versions, correlated within a class; all cases share the labels."""
    labels = (rng.random(num_rows) < 0.2).astype(np.float32)
    shift = [np.float32(norm.ppf(auc) * np.sqrt(2)) for auc in (AUC, candidate_auc)]
    common, own = (rng.standard_normal((cases, num_rows), dtype=np.float32) for _ in range(2))
    mixed = np.float32(correlation) * common + np.float32(np.sqrt(1 - correlation**2)) * own
    return Sample(labels, common + shift[0] * labels, mixed + shift[1] * labels)


def _paired_acts(sample: Sample) -> NDArray[np.bool_]:
    """Whether the paired test of the task metric acts at or before each unit."""
    losses = unit_aucs(sample.labels, sample.stable) - unit_aucs(sample.labels, sample.candidate)
    acts: NDArray[np.bool_] = log_wealth(losses) >= np.log(1 / ALPHA.task_paired)
    return acts


def _scores_act(sample: Sample) -> NDArray[np.bool_]:
    """Whether the scores are ever found too far apart; on a grid, for sorting them takes long."""
    edges = np.linspace(-4, 6, 64)
    alpha = ALPHA.scores / (2 * len(CONFIG.steps))
    acts = np.zeros(len(sample.stable), dtype=bool)
    for end in np.linspace(NUM_LABELS // 4, NUM_LABELS, 4, dtype=int):
        below = [
            np.stack([(scores[:, :end] <= edge).mean(axis=1) for edge in edges[::4]], axis=1)
            for scores in (sample.stable, sample.candidate)
        ]
        gap = np.abs(below[0] - below[1]).max(axis=1)
        acts |= gap - 2 * radius(int(end), alpha / 2) > CONFIG.max_score_shift
    return acts


def _events_act(
    rng: np.random.Generator, rate: float, alpha: float, num_alike: int
) -> NDArray[np.bool_]:
    """Whether failed or slow requests are ever held against the candidate, over four steps."""
    acts = np.zeros(num_alike, dtype=bool)
    strata: list[Stratum] = []
    pairs = 2 * rate * (1 - rate)
    for share, chance in ((0.5, pairs), (0.05, rate), (0.25, rate), (0.5, rate)):
        total, mine = np.zeros(num_alike, dtype=int), np.zeros(num_alike, dtype=int)
        for _ in range(NUM_LOOKS):
            new = rng.binomial(NUM_LABELS // NUM_LOOKS, chance, num_alike)
            mine, total = mine + rng.binomial(new, share), total + new
            evidence = log_ratio_evidence([*strata, Stratum(mine, total, share)], 1.0)
            acts |= evidence >= np.log(1 / alpha)
        strata.append(Stratum(mine, total, share))
    return acts
