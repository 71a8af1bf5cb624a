"""Where a run's time goes and which setting to change: rules with stated bounds.

Every finding names its numbers. A step is what a rank spends on reading, computing and exchanging;
the first steps are left out. The rank that comes last to an exchange waits for nobody there, so the
shortest exchange of all ranks is the exchange itself and what others spend more is waiting.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from tasks.contracts.telemetry import Diagnosis, Finding, HostTelemetry, RankTelemetry, Setting
from tasks.training.config import TrainingConfig
from tasks.training.telemetry.meters import computes_bf16
from tasks.training.telemetry.step_clock import STEP_PHASES, WARM_UP_STEPS

Kind = Literal["input", "communication", "compute", "memory", "imbalance"]
INPUT_SHARE = 0.20
WIRE_SHARE = 0.20
WAITING_SHARE = 0.15
UNEVEN = 1.25
"""A rank's own work over the others' that counts as imbalance."""
STARVED_SHARE = 0.75
"""CPU share of a computing thread below which others have its core."""
COMPUTE_SHARE = 0.60
ONE_PROCESS_SHARE = 0.40
"""Above it, one process with all the threads beats ranks on one CPU host."""
FAULTS_PER_STEP = 20
LARGEST_BATCH = 1 << 20
MIN_STEADY_STEPS = 3
KIND_NAMES = {
    "input": "input-bound",
    "communication": "communication-bound",
    "compute": "compute-bound",
    "memory": "memory-bound",
    "imbalance": "uneven ranks",
}


@dataclass(frozen=True)
class JobFacts:
    """What the diagnosis has to know of how a run was carried out."""

    config: TrainingConfig
    num_ranks: int
    """That took part, however they were chosen."""
    threads_per_rank: int
    num_cores: int = 1
    """That the ranks of one host may use."""
    has_bf16: bool = False
    """True where the device computes bf16 in hardware."""

    @classmethod
    def of_this_host(
        cls, config: TrainingConfig, num_ranks: int, threads_per_rank: int
    ) -> JobFacts:
        """Facts of a run on this host, or on hosts like it."""
        cores, on_cpu = len(os.sched_getaffinity(0)), config.device == "cpu"
        return cls(config, num_ranks, threads_per_rank, cores, on_cpu and computes_bf16())


class _Steps:
    """Seconds that a steady step takes each rank, by phase, and what follows from them.

    Ranks of an elastic run may have taken part in different numbers of steps.
    """

    def __init__(self, ranks: Sequence[RankTelemetry], host: HostTelemetry, job: JobFacts) -> None:
        self.host, self.job = host, job
        self.ranks = [rank for rank in ranks if _steady_steps(rank) >= MIN_STEADY_STEPS]
        self.num_hosts = len({rank.host for rank in ranks}) or 1
        self.data_s, self.compute_s, self.exchange_s = (
            [rank.phases[phase].steady_s / _steady_steps(rank) for rank in self.ranks]
            for phase in STEP_PHASES
        )
        self.work_s = [d + c for d, c in zip(self.data_s, self.compute_s, strict=True)]
        self.total_s = sum(self.work_s) + sum(self.exchange_s)
        total_s = self.total_s or 1.0
        self.data = min(sum(self.data_s) / total_s, 1.0)
        self.compute = min(sum(self.compute_s) / total_s, 1.0)
        self.wire = min(min(self.exchange_s, default=0.0) * len(self.ranks) / total_s, 1.0)
        self.waiting = max(sum(self.exchange_s) / total_s - self.wire, 0.0)


def diagnose(ranks: Sequence[RankTelemetry], host: HostTelemetry, job: JobFacts) -> Diagnosis:
    """Say what holds a run back and what to change: the heaviest first, but a cause before all.

    Args:
        ranks: what the clocks of all ranks showed at the end.
        host: the driver's host.
        job: how the run was carried out.
    """
    steps = _Steps(ranks, host, job)
    if steps.total_s <= 0:
        return Diagnosis(
            summary=f"Too short to be judged: {MIN_STEADY_STEPS} steps are needed after the first "
            f"{WARM_UP_STEPS}."
        )
    rules = (_imbalance, _input_bound, _communication_bound, _short_of_memory, _compute_bound)
    found = [finding for rule in rules if (finding := rule(steps))]
    # A rank without its core is slow at everything, exchanging too: so that cause comes first.
    findings = sorted(found, key=lambda f: (f.kind != "imbalance" or not f.suggestions, -f.share))
    kinds = ", ".join(KIND_NAMES[f.kind] for f in findings) or "nothing to change"
    summary = (
        f"{kinds}: a step of {_ms(steps.total_s / len(steps.ranks))} is {steps.compute:.0%} "
        f"computing, {steps.data:.0%} waiting for rows, {steps.wire:.0%} exchanging and "
        f"{steps.waiting:.0%} waiting for other ranks."
    )
    return Diagnosis(summary=summary[0].upper() + summary[1:], findings=tuple(findings))


def _finding(
    kind: Kind, share: float, evidence: str, advice: str, suggestions: dict[str, Setting]
) -> Finding:
    return Finding(
        kind=kind, share=share, evidence=evidence, advice=advice, suggestions=suggestions
    )


def _input_bound(steps: _Steps) -> Finding | None:
    """Every rank waits for rows; where only one does, it is an imbalance."""
    whole_s = [w + e for w, e in zip(steps.work_s, steps.exchange_s, strict=True)]
    lowest = min(d / s if s else 0.0 for d, s in zip(steps.data_s, whole_s, strict=True))
    if steps.data < INPUT_SHARE or lowest < INPUT_SHARE / 2:
        return None
    advice = "Give the run directory a faster disk, or the host memory that keeps its rows."
    evidence = f"Ranks wait for rows {_ms(fmean(steps.data_s))} a step, {steps.data:.0%} of it."
    return _finding("input", steps.data, evidence, advice, {})


def _communication_bound(steps: _Steps) -> Finding | None:
    """Fewer ranks on one CPU host, fewer bytes between hosts, else fewer exchanges for each row."""
    if steps.wire < WIRE_SHARE or len(steps.ranks) < 2:
        return None
    job, config = steps.job, steps.job.config
    sent_mb = fmean(r.wire_bytes / r.num_steps for r in steps.ranks) / 1e6
    evidence = (
        f"The exchange itself takes {_ms(min(steps.exchange_s))} a step, {steps.wire:.0%} of it, "
        f"for {sent_mb:.3g} MB sent by each rank."
    )
    larger = 2 * config.global_batch_size
    suggestions: dict[str, Setting] = {}
    advice = f"The batch of {config.global_batch_size} rows cannot grow further."
    if steps.num_hosts == 1 and config.device == "cpu" and steps.wire >= ONE_PROCESS_SHARE:
        threads = min(job.num_ranks * job.threads_per_rank, job.num_cores)
        suggestions = {"launch.ranks": 1, "launch.threads_per_rank": threads}
        advice = f"Use one rank with {threads} thread(s): one process needs no exchange."
    elif steps.num_hosts > 1 and config.strategy.gradient_compression == "none":
        suggestions = {"strategy.gradient_compression": "powersgd"}
        advice = "Set strategy.gradient_compression to powersgd: the network is what limits."
    elif larger <= LARGEST_BATCH:
        suggestions = {"global_batch_size": larger}
        advice = f"Raise global_batch_size to {larger}, and see that the quality holds."
    return _finding("communication", steps.wire, evidence, advice, suggestions)


def _imbalance(steps: _Steps) -> Finding | None:
    if len(steps.ranks) < 2 or steps.waiting < WAITING_SHARE:
        return None
    slowest = steps.work_s.index(max(steps.work_s))
    ratio = _to_others(steps.work_s, slowest)
    if ratio < UNEVEN:
        return None
    rank = steps.ranks[slowest]
    cause, advice, suggestions = _why_slowest(steps, slowest)
    evidence = (
        f"Ranks wait for others in {steps.waiting:.0%} of their steps' time: rank {rank.rank} on "
        f"{rank.host} takes {ratio:.1f} times as long as the others. {cause}"
    )
    return _finding("imbalance", steps.waiting, evidence, advice, suggestions)


def _why_slowest(steps: _Steps, slowest: int) -> tuple[str, str, dict[str, Setting]]:
    """Cause in a sentence, advice in another, settings to change."""
    job, cpu = steps.job, [_cpu_share(rank) for rank in steps.ranks]
    if job.config.device == "cpu" and cpu[slowest] < STARVED_SHARE * min(1.0, max(cpu)):
        fewer = max(1, job.num_ranks - 1)
        cause = f"Its thread got {cpu[slowest]:.0%} of a core: something else runs there."
        return cause, f"Free its core, or use {fewer} rank(s).", {"launch.ranks": fewer}
    if _more(steps.data_s, slowest) > _more(steps.work_s, slowest) / 2:
        cause = "Most of it is waiting for rows."
        return cause, "Its disk or its shards are slower to read.", {}
    rows = _to_others([rank.num_rows / rank.num_steps for rank in steps.ranks], slowest)
    if rows >= UNEVEN - 0.05:
        shards = job.config.num_shards
        even = job.num_ranks * max(1, -(-shards // job.num_ranks))
        advice = f"Set num_shards to {even}, a multiple of the ranks."
        cause = f"It has {rows:.2f} times as many rows."
        return cause, advice, {"num_shards": even} if even != shards else {}
    advice = "Its host or device is slower: replace it, or leave it out."
    return "It has the same rows and its core to itself.", advice, {}


def _short_of_memory(steps: _Steps) -> Finding | None:
    """Pages that come back from swap, step after step; a file in a memory map faults too."""
    faults = max(r.major_faults / r.num_steps for r in steps.ranks)
    swapped = steps.host.swapped_in_bytes
    if faults < FAULTS_PER_STEP or not swapped:
        return None
    parts = steps.job.config.strategy.accumulation_steps * 4
    evidence = (
        f"Memory is short: a rank reads {faults:.0f} pages a step back from disk, and "
        f"{swapped / 1e6:.0f} MB came back from swap."
    )
    advice = f"Compute a step in smaller parts (strategy.accumulation_steps {parts})."
    suggestions: dict[str, Setting] = {"strategy.accumulation_steps": parts}
    return _finding("memory", steps.compute, evidence, advice, suggestions if parts <= 1024 else {})


def _compute_bound(steps: _Steps) -> Finding | None:
    """A good state, so reported only where a setting would make it faster."""
    job = steps.job
    if steps.compute < COMPUTE_SHARE:
        return None
    suggestions: dict[str, Setting] = {}
    threads = job.num_cores // -(-job.num_ranks // steps.num_hosts)
    if job.config.device == "cpu" and threads > job.threads_per_rank:
        suggestions |= {"launch.ranks": job.num_ranks, "launch.threads_per_rank": threads}
    if job.has_bf16 and job.config.strategy.precision == "fp32":
        suggestions["strategy.precision"] = "bf16"
    if not suggestions:
        return None
    changes = ", ".join(f"{name} to {value}" for name, value in suggestions.items())
    evidence = (
        f"Ranks compute in {steps.compute:.0%} of their steps' time with {job.threads_per_rank} "
        f"thread(s) each; a host has {job.num_cores} core(s)."
    )
    return _finding("compute", steps.compute, evidence, f"Set {changes}.", suggestions)


def _steady_steps(rank: RankTelemetry) -> int:
    return max(0, rank.num_steps - WARM_UP_STEPS)


def _cpu_share(rank: RankTelemetry) -> float:
    """CPU share of the loop's thread while it computed."""
    compute = rank.phases["compute"]
    return compute.steady_cpu_s / compute.steady_s if compute.steady_s > 0 else 1.0


def _more(values: Sequence[float], one: int) -> float:
    """A rank's value less the mean of the others'."""
    return values[one] - (sum(values) - values[one]) / (len(values) - 1)


def _to_others(values: Sequence[float], one: int) -> float:
    return values[one] / max(values[one] - _more(values, one), 1e-9)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
