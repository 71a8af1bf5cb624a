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
from tasks.training.telemetry.host import computes_bf16
from tasks.training.telemetry.profiler import ProfileSummary
from tasks.training.telemetry.step_clock import STEP_PHASES, WARM_UP_STEPS

INPUT_SHARE = 0.20
WIRE_SHARE = 0.20
WAITING_SHARE = 0.15
UNEVEN = 1.25
"""A rank's own work over the others' that counts as imbalance."""
STARVED_SHARE = 0.75
"""CPU share of a computing thread below which others have its core."""
CROWDED_SHARE = 0.50
"""The same of all ranks' threads: the host is too full."""
COMPUTE_SHARE = 0.60
OPTIMIZER_SHARE = 0.30
MOVING_SHARE = 0.60
ONE_PROCESS_SHARE = 0.40
"""Above it, one process with all the threads beats ranks on one CPU host."""
FAULTS_PER_STEP = 20
MEMORY_SHARE = 0.90
WANTED_WIRE_SHARE = 0.15
RAISES = (2, 4, 8)
"""Factors by which a batch may be raised."""
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

    num_ranks: int
    threads_per_rank: int
    global_batch_size: int
    num_shards: int
    num_cores: int
    """That the ranks of one host may use."""
    device: str = "cpu"
    num_hosts: int = 1
    precision: str = "fp32"
    has_bf16: bool = False
    """True where the device computes bf16 in hardware."""
    accumulation_steps: int = 1
    gradient_compression: str = "none"
    reading_mode: str = "memory"
    """`memory` or `stream`: where rows are held."""

    @classmethod
    def of(
        cls, config: TrainingConfig, num_ranks: int, threads_per_rank: int, reading_mode: str
    ) -> JobFacts:
        """Facts of a run on this host, or on hosts like it.

        Args:
            config: of the run.
            num_ranks: ranks that took part, however they were chosen.
            threads_per_rank: of each.
            reading_mode: `memory` or `stream`, as it was carried out.
        """
        return cls(
            num_ranks=num_ranks,
            threads_per_rank=threads_per_rank,
            global_batch_size=config.global_batch_size,
            num_shards=config.num_shards,
            num_cores=len(os.sched_getaffinity(0)),
            device=config.device,
            precision=config.strategy.precision,
            has_bf16=config.device == "cpu" and computes_bf16(),
            accumulation_steps=config.strategy.accumulation_steps,
            gradient_compression=config.strategy.gradient_compression,
            reading_mode=reading_mode,
        )


class _Shares:
    """Seconds that a steady step takes each rank, by phase, and what follows from them.

    Ranks of an elastic run may have taken part in different numbers of steps.
    """

    def __init__(self, ranks: Sequence[RankTelemetry]) -> None:
        self.ranks = [rank for rank in ranks if _steady_steps(rank) >= MIN_STEADY_STEPS]
        self.data_s, self.compute_s, self.exchange_s = (
            [rank.phases[phase].steady_s / _steady_steps(rank) for rank in self.ranks]
            for phase in STEP_PHASES
        )
        self.work_s = [d + c for d, c in zip(self.data_s, self.compute_s, strict=True)]
        self.total_s = sum(self.work_s) + sum(self.exchange_s)
        total_s = self.total_s or 1.0
        self.data = min(sum(self.data_s) / total_s, 1.0)
        self.compute = min(sum(self.compute_s) / total_s, 1.0)
        shortest_s = min(self.exchange_s, default=0.0)
        self.wire = min(shortest_s * len(self.ranks) / total_s, 1.0)
        self.waiting = max(sum(self.exchange_s) / total_s - self.wire, 0.0)

    def data_share(self, rank: int) -> float:
        own = self.work_s[rank] + self.exchange_s[rank]
        return self.data_s[rank] / own if own else 0.0


def diagnose(
    ranks: Sequence[RankTelemetry],
    host: HostTelemetry,
    job: JobFacts,
    profiles: Sequence[ProfileSummary] = (),
) -> Diagnosis:
    """Say what holds a run back and what to change: the heaviest first, but a cause before all.

    Args:
        ranks: what the clocks of all ranks showed at the end.
        host: the driver's host.
        job: how the run was carried out.
        profiles: of the ranks, where a profile was asked for.
    """
    shares = _Shares(ranks)
    if shares.total_s <= 0:
        measured = max([_steady_steps(rank) for rank in ranks], default=0)
        return Diagnosis(
            summary=f"Too short to be judged: after the first {WARM_UP_STEPS} steps, {measured} "
            f"were measured and {MIN_STEADY_STEPS} are needed."
        )
    imbalance = _imbalance(shares, job)
    found = [
        imbalance,
        _input_bound(shares, job),
        _communication_bound(shares, job),
        _short_of_memory(shares, host, job),
        _memory_bound(shares, job, profiles),
        _compute_bound(shares, host, job),
    ]
    # A rank without its core is slow at everything, exchanging too: so that cause comes first.
    starved = imbalance if imbalance and "launch.ranks" in imbalance.suggestions else None
    findings = sorted((f for f in found if f), key=lambda f: (f is not starved, -f.share))
    return Diagnosis(summary=_summary(shares, findings), findings=tuple(findings))


def _summary(shares: _Shares, findings: Sequence[Finding]) -> str:
    kinds = ", ".join(KIND_NAMES[f.kind] for f in findings) or "Nothing to change"
    return _sentence(
        f"{kinds}: a step of {_ms(shares.total_s / len(shares.ranks))} is "
        f"{_percent(shares.compute)} computing, {_percent(shares.data)} waiting for rows, "
        f"{_percent(shares.wire)} exchanging and {_percent(shares.waiting)} waiting for other "
        "ranks."
    )


def _input_bound(shares: _Shares, job: JobFacts) -> Finding | None:
    """Every rank waits for rows; where only one does, it is an imbalance."""
    lowest = min(shares.data_share(rank) for rank in range(len(shares.ranks)))
    if shares.data < INPUT_SHARE or lowest < INPUT_SHARE / 2:
        return None
    suggestions = _rows_in_memory(job)
    return Finding(
        kind="input",
        share=shares.data,
        evidence=f"Ranks wait for rows in {_percent(shares.data)} of their steps' time, "
        f"{_ms(fmean(shares.data_s))} a step.",
        advice="Set reading.mode to memory if the rows fit."
        if suggestions
        else "The rows are in memory already: make the preparation of a batch cheaper.",
        suggestions=suggestions,
    )


def _rows_in_memory(job: JobFacts) -> dict[str, Setting]:
    return {} if job.reading_mode == "memory" else {"reading.mode": "memory"}


def _communication_bound(shares: _Shares, job: JobFacts) -> Finding | None:
    if shares.wire < WIRE_SHARE or len(shares.ranks) < 2:
        return None
    sent = fmean(r.wire_bytes / r.num_steps for r in shares.ranks)
    advice, suggestions = _less_communication(shares.wire, job)
    return Finding(
        kind="communication",
        share=shares.wire,
        evidence=f"The exchange itself takes {_percent(shares.wire)} of the steps' time, "
        f"{_ms(min(shares.exchange_s))} a step for {_size(sent)} sent by each rank.",
        advice=advice,
        suggestions=suggestions,
    )


def _less_communication(wire: float, job: JobFacts) -> tuple[str, dict[str, Setting]]:
    """Fewer ranks on one CPU host, fewer bytes between hosts, else fewer exchanges for each row."""
    if job.num_hosts == 1 and job.device == "cpu" and wire >= ONE_PROCESS_SHARE:
        threads = min(job.num_ranks * job.threads_per_rank, job.num_cores)
        return (
            f"Set launch.ranks from {job.num_ranks} to 1 and launch.threads_per_rank from "
            f"{job.threads_per_rank} to {threads}: one process needs no exchange.",
            {"launch.ranks": 1, "launch.threads_per_rank": threads},
        )
    if job.num_hosts > 1 and job.gradient_compression == "none":
        return (
            "Set strategy.gradient_compression to powersgd: the network between the hosts is what "
            "limits.",
            {"strategy.gradient_compression": "powersgd"},
        )
    return _larger_batch(wire, job, "fewer exchanges for each row")


def _larger_batch(share: float, job: JobFacts, why: str) -> tuple[str, dict[str, Setting]]:
    """Cost that comes once a step weighs less in larger steps, up to a limit on the batch."""
    enough = [k for k in RAISES if share / (share + (1 - share) * k) <= WANTED_WIRE_SHARE]
    size = job.global_batch_size * (enough or RAISES[-1:])[0]
    if size > LARGEST_BATCH:
        return f"The batch of {job.global_batch_size} rows cannot grow further.", {}
    return (
        f"Raise global_batch_size from {job.global_batch_size} to {size}: {why}; see that the "
        "quality holds.",
        {"global_batch_size": size},
    )


def _imbalance(shares: _Shares, job: JobFacts) -> Finding | None:
    if len(shares.ranks) < 2 or shares.waiting < WAITING_SHARE:
        return None
    work_s = shares.work_s
    slowest = work_s.index(max(work_s))
    ratio = work_s[slowest] / max(_mean_of_others(work_s, slowest), 1e-9)
    if ratio < UNEVEN:
        return None
    rank = shares.ranks[slowest]
    cause, advice, suggestions = _why_slowest(shares, slowest, job)
    return Finding(
        kind="imbalance",
        share=shares.waiting,
        evidence=f"Ranks wait for others in {_percent(shares.waiting)} of their steps' time: rank "
        f"{rank.rank} on {rank.host} takes {ratio:.1f} times as long as the others, "
        f"{_ms(work_s[slowest])} a step. {cause}",
        advice=advice,
        suggestions=suggestions,
    )


def _why_slowest(
    shares: _Shares, slowest: int, job: JobFacts
) -> tuple[str, str, dict[str, Setting]]:
    """Cause in a sentence, advice in another, settings to change."""
    cpu = [_cpu_share(rank) for rank in shares.ranks]
    cpu_others = _mean_of_others(cpu, slowest)
    if job.device == "cpu" and cpu[slowest] < min(STARVED_SHARE, cpu_others):
        fewer = max(1, job.num_ranks - 1)
        return (
            f"Its thread got {_percent(cpu[slowest])} of a core while it computed (others "
            f"{_percent(cpu_others)}): something else runs there.",
            f"Free its core, or set launch.ranks from {job.num_ranks} to {fewer}.",
            {"launch.ranks": fewer},
        )
    more_data_s = shares.data_s[slowest] - _mean_of_others(shares.data_s, slowest)
    more_work_s = shares.work_s[slowest] - _mean_of_others(shares.work_s, slowest)
    if more_data_s > more_work_s / 2:
        suggestions = _rows_in_memory(job)
        remedy = "; set reading.mode to memory." if suggestions else "."
        return (
            f"Most of it is waiting for rows, {_percent(shares.data_share(slowest))} of its time.",
            f"Its disk or its shards are slower to read{remedy}",
            suggestions,
        )
    step_rows = [rank.num_rows / rank.num_steps for rank in shares.ranks]
    rows = step_rows[slowest] / max(_mean_of_others(step_rows, slowest), 1e-9)
    if rows >= UNEVEN - 0.05:
        even = job.num_ranks * max(1, -(-job.num_shards // job.num_ranks))
        return (
            f"It has {rows:.2f} times as many rows.",
            f"Set num_shards from {job.num_shards} to {even}, a multiple of the ranks.",
            {"num_shards": even} if even != job.num_shards else {},
        )
    return (
        "It has the same rows and its core to itself.",
        f"The host or device of rank {shares.ranks[slowest].rank} is slower: replace it, or leave "
        "it out.",
        {},
    )


def _short_of_memory(shares: _Shares, host: HostTelemetry, job: JobFacts) -> Finding | None:
    """Pages that come back from disk or swap, step after step."""
    faults = max(r.major_faults / r.num_steps for r in shares.ranks)
    used = sum(r.peak_memory_bytes for r in shares.ranks if r.host == host.name) / host.memory_bytes
    if faults < FAULTS_PER_STEP or (not host.swapped_in_bytes and used < MEMORY_SHARE):
        return None
    parts = job.accumulation_steps * 4
    return Finding(
        kind="memory",
        share=shares.compute,
        evidence=f"Memory is short: a rank reads {faults:.0f} pages a step back from disk, "
        f"{host.swapped_in_bytes / 1e6:.0f} MB came back from swap, and the ranks' peaks are "
        f"{_percent(used)} of the host's {host.memory_bytes / 1e9:.1f} GB.",
        advice=f"Raise strategy.accumulation_steps from {job.accumulation_steps} to {parts}, which "
        "computes a step in smaller parts, or read out of core.",
        suggestions={"strategy.accumulation_steps": parts} if parts <= 1024 else {},
    )


def _memory_bound(
    shares: _Shares, job: JobFacts, profiles: Sequence[ProfileSummary]
) -> Finding | None:
    """Most operations move values instead of computing; told by a profile alone."""
    inside_s = sum(p.operations_s for p in profiles)
    if not inside_s or shares.compute < WIRE_SHARE:
        return None

    def share(*kinds: Literal["matmul", "optimizer", "move", "allocate"]) -> float:
        return sum(p.seconds[kind] for p in profiles for kind in kinds) / inside_s

    optimizer, moving = share("optimizer"), share("move", "allocate")
    if optimizer < OPTIMIZER_SHARE and moving < MOVING_SHARE:
        return None
    suggestions: dict[str, Setting]
    if optimizer >= OPTIMIZER_SHARE:
        advice, suggestions = _larger_batch(
            optimizer, job, "the optimizer passes through all weights once a step"
        )
    elif job.has_bf16 and job.precision == "fp32":
        advice = "Set strategy.precision from fp32 to bf16: half the bytes to move."
        suggestions = {"strategy.precision": "bf16"}
    else:
        advice, suggestions = "Fuse operations: strategy.compile.", {"strategy.compile": True}
    return Finding(
        kind="memory",
        share=shares.compute * max(optimizer, moving),
        evidence=f"Of the time in operations the optimizer takes {_percent(optimizer)} and others "
        f"that move values through memory {_percent(moving)}; matrix products take "
        f"{_percent(share('matmul'))}.",
        advice=advice,
        suggestions=suggestions,
    )


def _compute_bound(shares: _Shares, host: HostTelemetry, job: JobFacts) -> Finding | None:
    """A good state, so told only where a setting would make it faster."""
    if shares.compute < COMPUTE_SHARE:
        return None
    cpu = fmean(_cpu_share(rank) for rank in shares.ranks)
    if job.device == "cpu" and cpu < CROWDED_SHARE:
        return Finding(
            kind="compute",
            share=shares.compute,
            evidence=f"While they compute, the ranks' threads get {_percent(cpu)} of a core each; "
            f"the host's cores were {_percent(host.cpu_share_mean or 0.0)} busy.",
            advice="Other programs take the host's cores: run when they do not.",
        )
    suggestions: dict[str, Setting] = {}
    parts = []
    ranks_per_host = -(-job.num_ranks // job.num_hosts)
    threads = job.num_cores // ranks_per_host
    if job.device == "cpu" and threads > job.threads_per_rank:
        suggestions |= {"launch.ranks": job.num_ranks, "launch.threads_per_rank": threads}
        parts.append(
            f"raise launch.threads_per_rank from {job.threads_per_rank} to {threads}: "
            f"{job.num_cores - ranks_per_host * job.threads_per_rank} core(s) of a host are idle"
        )
    if job.has_bf16 and job.precision == "fp32":
        suggestions["strategy.precision"] = "bf16"
        parts.append("set strategy.precision from fp32 to bf16, which this hardware computes")
    if not parts:
        return None
    return Finding(
        kind="compute",
        share=shares.compute,
        evidence=f"Ranks compute in {_percent(shares.compute)} of their steps' time.",
        advice=_sentence(f"{'; '.join(parts)}."),
        suggestions=suggestions,
    )


def _steady_steps(rank: RankTelemetry) -> int:
    return max(0, rank.num_steps - WARM_UP_STEPS)


def _cpu_share(rank: RankTelemetry) -> float:
    """CPU share of the loop's thread while it computed."""
    compute = rank.phases["compute"]
    return compute.steady_cpu_s / compute.steady_s if compute.steady_s > 0 else 1.0


def _mean_of_others(values: Sequence[float], one: int) -> float:
    return (sum(values) - values[one]) / (len(values) - 1)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
