"""Where a run's time goes and which setting to change: rules with stated bounds.

Every finding names its numbers. A step is what a rank spends on reading, computing and exchanging;
the first steps are left out. The rank that comes last to an exchange waits for nobody there, so the
shortest exchange of all ranks is the exchange itself and what others spend more is waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contracts.telemetry import Diagnosis, Finding, HostTelemetry, RankTelemetry, Setting
from tasks.training.telemetry.step_clock import STEP_PHASES, WARM_UP_STEPS
from tasks.training.telemetry.trace import ExchangeStages, ProfileSummary

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
LARGEST_RAISE = 8
LARGEST_BATCH = 1 << 20
MIN_STEADY_STEPS = 3


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


@dataclass(frozen=True)
class _Shares:
    """Seconds that a steady step takes each rank, by phase, and what follows from them."""

    ranks: Sequence[RankTelemetry]
    data_s: list[float]
    compute_s: list[float]
    exchange_s: list[float]

    @classmethod
    def of(cls, ranks: Sequence[RankTelemetry]) -> _Shares:
        """Ranks of an elastic run may have taken part in different numbers of steps."""
        judged = [rank for rank in ranks if _steady_steps(rank) >= MIN_STEADY_STEPS]
        data_s, compute_s, exchange_s = (
            [rank.phases[phase].steady_s / _steady_steps(rank) for rank in judged]
            for phase in STEP_PHASES
        )
        return cls(judged, data_s, compute_s, exchange_s)

    @property
    def total_s(self) -> float:
        return sum(self.data_s) + sum(self.compute_s) + sum(self.exchange_s)

    @property
    def step_s(self) -> float:
        return self.total_s / len(self.ranks)

    @property
    def data(self) -> float:
        return min(sum(self.data_s) / self.total_s, 1.0)

    @property
    def compute(self) -> float:
        return min(sum(self.compute_s) / self.total_s, 1.0)

    @property
    def wire(self) -> float:
        return min(min(self.exchange_s) * len(self.ranks) / self.total_s, 1.0)

    @property
    def waiting(self) -> float:
        return max(sum(self.exchange_s) / self.total_s - self.wire, 0.0)

    @property
    def work_s(self) -> list[float]:
        return [d + c for d, c in zip(self.data_s, self.compute_s, strict=True)]

    def data_share(self, rank: int) -> float:
        own = self.work_s[rank] + self.exchange_s[rank]
        return self.data_s[rank] / own if own else 0.0


def diagnose(
    ranks: Sequence[RankTelemetry],
    host: HostTelemetry,
    job: JobFacts,
    profiles: Sequence[ProfileSummary] = (),
    stages: ExchangeStages | None = None,
) -> Diagnosis:
    """Say what holds a run back and what to change: the heaviest first, but a cause before all.

    Args:
        ranks: what the clocks of all ranks showed at the end.
        host: the driver's host.
        job: how the run was carried out.
        profiles: of the ranks, where a profile was asked for.
        stages: of Horovod's exchanges, where a profile was asked for.
    """
    shares = _Shares.of(ranks)
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
        _communication_bound(shares, job, stages),
        _short_of_memory(shares, host, job),
        _memory_bound(shares, job, profiles),
        _compute_bound(shares, host, job),
    ]
    # A rank without its core is slow at everything, exchanging too: so that cause comes first.
    starved = imbalance if imbalance and "launch.ranks" in imbalance.suggestions else None
    findings = sorted((f for f in found if f), key=lambda f: (f is not starved, -f.share))
    return Diagnosis(summary=_summary(shares, findings), findings=tuple(findings))


def _summary(shares: _Shares, findings: Sequence[Finding]) -> str:
    parts = (
        f"a step of {_ms(shares.step_s)} is {_percent(shares.compute)} computing, "
        f"{_percent(shares.data)} waiting for rows, {_percent(shares.wire)} exchanging and "
        f"{_percent(shares.waiting)} waiting for other ranks"
    )
    if not findings:
        return f"Nothing to change: {parts}."
    names = {
        "input": "input-bound",
        "communication": "communication-bound",
        "compute": "compute-bound",
        "memory": "memory-bound",
        "imbalance": "uneven ranks",
    }
    return _sentence(f"{', '.join(names[f.kind] for f in findings)}: {parts}.")


def _input_bound(shares: _Shares, job: JobFacts) -> Finding | None:
    """Every rank waits for rows; where only one does, it is an imbalance."""
    lowest = min(shares.data_share(rank) for rank in range(len(shares.ranks)))
    if shares.data < INPUT_SHARE or lowest < INPUT_SHARE / 2:
        return None
    suggestions: dict[str, Setting] = {}
    advice = "The rows are in memory already: make the preparation of a batch cheaper."
    if job.reading_mode != "memory":
        suggestions["reading.mode"] = "memory"
        advice = "Set reading.mode to memory if the rows fit, or prefetch more batches."
    return Finding(
        kind="input",
        share=shares.data,
        evidence=f"Ranks wait for rows in {_percent(shares.data)} of their steps' time, "
        f"{_ms(sum(shares.data_s) / len(shares.ranks))} a step.",
        advice=advice,
        suggestions=suggestions,
    )


def _communication_bound(
    shares: _Shares, job: JobFacts, stages: ExchangeStages | None
) -> Finding | None:
    if shares.wire < WIRE_SHARE or len(shares.ranks) < 2:
        return None
    sent = sum(r.wire_bytes / r.num_steps for r in shares.ranks) / len(shares.ranks)
    evidence = (
        f"The exchange itself takes {_percent(shares.wire)} of the steps' time, "
        f"{_ms(min(shares.exchange_s))} a step for {_size(sent)} sent by each rank."
    )
    if stages is not None and stages.num_exchanges:
        evidence += (
            f" Horovod's timeline: {_ms(stages.negotiate_s / stages.num_exchanges)} until all are "
            f"ready, {_ms(stages.transfer_s / stages.num_exchanges)} in the transfer, for each of "
            f"{stages.num_exchanges} exchanges."
        )
    advice, suggestions = _less_communication(shares.wire, job)
    return Finding(
        kind="communication",
        share=shares.wire,
        evidence=evidence,
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
    raises = [2**k for k in range(1, LARGEST_RAISE.bit_length())]
    enough = next((k for k in raises if share / (share + (1 - share) * k) <= WANTED_WIRE_SHARE), 8)
    size = job.global_batch_size * enough
    if size > LARGEST_BATCH:
        return (f"The batch of {job.global_batch_size} rows cannot grow further.", {})
    return (
        f"Raise global_batch_size from {job.global_batch_size} to {size}: {why}; see that the "
        "quality holds.",
        {"global_batch_size": size},
    )


def _imbalance(shares: _Shares, job: JobFacts) -> Finding | None:
    if len(shares.ranks) < 2 or shares.waiting < WAITING_SHARE:
        return None
    work_s = shares.work_s
    slowest = max(range(len(work_s)), key=lambda rank: work_s[rank])
    others = [w for rank, w in enumerate(work_s) if rank != slowest]
    ratio = work_s[slowest] / max(sum(others) / len(others), 1e-9)
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
    rank, others = shares.ranks[slowest], [r for r in shares.ranks if r != shares.ranks[slowest]]
    cpu, cpu_others = _cpu_share(rank), [_cpu_share(r) for r in others]
    if job.device == "cpu" and cpu < STARVED_SHARE and cpu < sum(cpu_others) / len(others):
        fewer = max(1, job.num_ranks - 1)
        return (
            f"Its thread got {_percent(cpu)} of a core while it computed (others "
            f"{_percent(sum(cpu_others) / len(others))}): something else runs there.",
            f"Free its core, or set launch.ranks from {job.num_ranks} to {fewer}.",
            {"launch.ranks": fewer},
        )
    data_others_s = [s for r, s in enumerate(shares.data_s) if r != slowest]
    more_data_s = shares.data_s[slowest] - sum(data_others_s) / len(data_others_s)
    more_work_s = shares.work_s[slowest] - (sum(shares.work_s) - shares.work_s[slowest]) / len(
        others
    )
    if more_data_s > more_work_s / 2:
        suggestions: dict[str, Setting] = {}
        if job.reading_mode != "memory":
            suggestions["reading.mode"] = "memory"
        return (
            f"Most of it is waiting for rows, {_percent(shares.data_share(slowest))} of its time.",
            "Its disk or its shards are slower to read"
            + ("; set reading.mode to memory." if suggestions else "."),
            suggestions,
        )
    rows_others = sum(r.num_rows / r.num_steps for r in others) / len(others)
    rows = rank.num_rows / rank.num_steps / max(rows_others, 1e-9)
    if rows >= UNEVEN - 0.05:
        even = job.num_ranks * max(1, -(-job.num_shards // job.num_ranks))
        return (
            f"It has {rows:.2f} times as many rows.",
            f"Set num_shards from {job.num_shards} to {even}, a multiple of the ranks.",
            {"num_shards": even} if even != job.num_shards else {},
        )
    return (
        "It has the same rows and its core to itself.",
        f"The host or device of rank {rank.rank} is slower: replace it, or leave it out.",
        {},
    )


def _steady_steps(rank: RankTelemetry) -> int:
    return max(0, rank.num_steps - WARM_UP_STEPS)


def _cpu_share(rank: RankTelemetry) -> float:
    """CPU share of the loop's thread while it computed."""
    compute = rank.phases["compute"]
    return compute.steady_cpu_s / compute.steady_s if compute.steady_s > 0 else 1.0


def _mean_cpu_share(shares: _Shares) -> float:
    return sum(_cpu_share(rank) for rank in shares.ranks) / len(shares.ranks)


def _short_of_memory(shares: _Shares, host: HostTelemetry, job: JobFacts) -> Finding | None:
    """Pages that come back from disk or swap, step after step."""
    faults = max(r.major_faults / r.num_steps for r in shares.ranks)
    on_host = [r.peak_memory_bytes for r in shares.ranks if r.host == host.name]
    used = sum(on_host) / host.memory_bytes
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
    inside = sum(p.operations_s for p in profiles)
    if not inside or shares.compute < WIRE_SHARE:
        return None
    optimizer = sum(p.seconds["optimizer"] for p in profiles) / inside
    moving = sum(p.seconds["move"] + p.seconds["allocate"] for p in profiles) / inside
    if optimizer < OPTIMIZER_SHARE and moving < MOVING_SHARE:
        return None
    evidence = (
        f"Of the time in operations the optimizer takes {_percent(optimizer)} and others that move "
        f"values through memory {_percent(moving)}; matrix products take "
        f"{_percent(sum(p.seconds['matmul'] for p in profiles) / inside)}."
    )
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
        evidence=evidence,
        advice=advice,
        suggestions=suggestions,
    )


def _compute_bound(shares: _Shares, host: HostTelemetry, job: JobFacts) -> Finding | None:
    """A good state, so told only where a setting would make it faster."""
    if shares.compute < COMPUTE_SHARE:
        return None
    if job.device == "cpu" and (cpu := _mean_cpu_share(shares)) < CROWDED_SHARE:
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


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
