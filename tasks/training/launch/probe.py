"""How many ranks, with how many threads each, pay on one CPU host: measured, not believed.

On one host the fastest is often one process with all cores, because exchanging gradients costs what
threads get for nothing; it depends on the network, the batch and the processor. So before a long
run each candidate takes real steps on synthetic rows, in turns, and several ranks are taken only if
they are clearly faster.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt, ValidationError

from tasks.contracts.base import Contract
from tasks.settings import code_digest, content_key, write_atomically
from tasks.training.launch.config import LaunchConfig
from tasks.training.launch.host import Host, busy_share
from tasks.training.launch.nursery import Nursery
from tasks.training.launch.probe_job import Layout, ProbeJob
from tasks.training.launch.probe_measure import ANSWER_WITHIN_S, measure

LOGGER = logging.getLogger(__name__)
LOOK_S = 0.2
MAX_BUSY_SHARE = 0.25


class Measured(Contract):
    """What one candidate reached."""

    num_ranks: PositiveInt
    threads_per_rank: PositiveInt
    rows_per_s: PositiveFloat | None
    """Median of its turns; None where its ranks failed."""

    def __str__(self) -> str:
        speed = "failed" if self.rows_per_s is None else f"{self.rows_per_s:,.0f} rows/s"
        return f"{Layout(self.num_ranks, self.threads_per_rank)}: {speed}"


class RankPlan(Contract):
    """How many ranks a run gets, and why; recorded with the run."""

    num_ranks: PositiveInt
    threads_per_rank: PositiveInt
    reason: str
    measured: tuple[Measured, ...] = ()

    def __str__(self) -> str:
        return f"{Layout(self.num_ranks, self.threads_per_rank)}; {self.reason}"


def decide_ranks(
    job: ProbeJob,
    launch: LaunchConfig,
    device: str,
    host: Host,
    cache: Path,
    nursery: Nursery | None = None,
) -> RankPlan:
    """Ranks and threads for a run on this host: as configured, one a GPU, or measured.

    Args:
        job: the run.
        launch: what is configured.
        device: `cpu` or `cuda`.
        host: what there is.
        cache: folder in which results are kept, by their content.
        nursery: where to fork the probe's ranks, with `probe_measure.PROBE_MODULE` among its
            modules; they then start some seconds sooner.

    Raises:
        TransientError: the ranks of the probe ended or did not answer.
    """
    plan = _without_measuring(job, launch, device, host)
    if plan is None:
        plan = _cached_or_measured(job, launch, host, cache, nursery)
    LOGGER.info("%s", plan)
    return plan


def _without_measuring(
    job: ProbeJob, launch: LaunchConfig, device: str, host: Host
) -> RankPlan | None:
    """The plan where there is nothing to measure, or where that is not worth its time."""
    smallest = job.strategy.ranks_per_replica
    if launch.ranks != "auto":
        return _plan(launch.ranks, launch, host, "as configured")
    if device == "cuda":
        ranks = max(smallest, host.num_gpus)
        return _plan(ranks, launch, host, f"one for each of {host.num_gpus} GPU(s)")
    if len(candidates(host.num_cores, launch.probe_max_ranks, smallest)) == 1:
        return _plan(smallest, launch, host, "there are no cores to divide")
    at_most_s = job.seconds_at_most(host.num_cores)
    if at_most_s < launch.probe_above_s:
        return _plan(smallest, launch, host, _too_short(at_most_s, launch))
    return None


def _plan(ranks: int, launch: LaunchConfig, host: Host, reason: str) -> RankPlan:
    given = launch.threads_per_rank
    threads = max(1, host.num_cores // ranks) if given == "auto" else given
    return RankPlan(num_ranks=ranks, threads_per_rank=threads, reason=reason)


def _too_short(seconds: float, launch: LaunchConfig) -> str:
    return (
        f"other numbers were not tried: on an idle host training takes at most about {seconds:.0f} "
        f"s, and they are above probe_above_s={launch.probe_above_s:g}"
    )


def candidates(num_cores: int, max_ranks: int, smallest: int = 1) -> list[Layout]:
    """All cores for the fewest ranks, then twice as many ranks with half the threads, and so on.

    Args:
        num_cores: cores of the host.
        max_ranks: no more ranks than this, unless `smallest` is more.
        smallest: ranks that share a replica; every number of ranks is a multiple of it.
    """
    found = [Layout(smallest, max(1, num_cores // smallest))]
    while (ranks := 2 * found[-1].num_ranks) <= min(num_cores, max_ranks):
        found.append(Layout(ranks, num_cores // ranks))
    return found


def _cached_or_measured(
    job: ProbeJob, launch: LaunchConfig, host: Host, cache: Path, nursery: Nursery | None
) -> RankPlan:
    key = content_key(
        job.speed, launch, host.cpu, host.num_cores, version("torch"), code_digest(__file__)
    )
    file = cache / f"{key}.json"
    if (kept := _read_plan(file)) is not None:
        return kept
    if nursery is not None:
        nursery.wait_until_ready(ANSWER_WITHIN_S)
    others = busy_share(LOOK_S)
    plan = _measured(job, launch, host, nursery)
    if not plan.measured:
        return plan
    if others > MAX_BUSY_SHARE:
        # True for now, and not for later: threads that wait for each other suffer most.
        note = f"{plan.reason}; not kept, since other programs took {others:.0%} of the processor"
        return plan.model_copy(update={"reason": note})
    write_atomically(file, plan.model_dump_json(indent=1))
    return plan


def _read_plan(file: Path) -> RankPlan | None:
    try:
        return RankPlan.model_validate_json(file.read_text())
    except (FileNotFoundError, ValidationError):
        return None


def _measured(job: ProbeJob, launch: LaunchConfig, host: Host, nursery: Nursery | None) -> RankPlan:
    smallest = job.strategy.ranks_per_replica
    layouts = candidates(host.num_cores, launch.probe_max_ranks, smallest)
    with tempfile.TemporaryDirectory(prefix="falaj-probe-") as scratch:
        outcome = measure(
            job, layouts, launch.probe_above_s, launch.probe_limit_s, Path(scratch), nursery
        )
    if isinstance(outcome, float):
        return _plan(smallest, launch, host, _too_short(outcome, launch))
    return choose(
        [
            Measured(num_ranks=at.num_ranks, threads_per_rank=at.threads, rows_per_s=speed)
            for at, speed in outcome.items()
        ],
        launch.min_gain,
    )


def choose(measured: Sequence[Measured], min_gain: float) -> RankPlan:
    """The fastest candidate, if it is clearly faster than the first, else the first.

    Args:
        measured: the candidates; the first has the fewest ranks and has been measured.
        min_gain: share by which it must be faster.
    """
    first = measured[0]
    fastest = max(measured, key=lambda each: each.rows_per_s or 0.0)
    gain = (fastest.rows_per_s or 0.0) / (first.rows_per_s or 1.0) - 1
    taken = fastest if gain >= min_gain else first
    why = f"{gain:.0%} faster" if taken is not first else f"none is {min_gain:.0%} faster"
    return RankPlan(
        num_ranks=taken.num_ranks,
        threads_per_rank=taken.threads_per_rank,
        reason=f"{'; '.join(map(str, measured))}; {why}",
        measured=tuple(measured),
    )
