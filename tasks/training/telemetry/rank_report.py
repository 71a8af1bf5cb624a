"""What is reported of one rank: its own clock, and what was seen of its processes."""

from __future__ import annotations

from tasks.contracts.telemetry import RankTelemetry
from tasks.training.telemetry.processes import RankProcesses
from tasks.training.telemetry.step_clock import STEP_PHASES, ClockReading


def rows_per_s(clock: ClockReading) -> float | None:
    """Rows a second of one rank in training steps, without the first; None before there is one."""
    steady_s = sum(clock.phases[name].steady_s for name in STEP_PHASES)
    return clock.steady_rows / steady_s if clock.steady_steps and steady_s > 0 else None


def rank_telemetry(clock: ClockReading, processes: RankProcesses) -> RankTelemetry:
    """Put together what is known of a rank.

    Args:
        clock: its last reading.
        processes: samples of its processes; none where it ran on another host.
    """
    sampled_bytes = int(processes.resident_bytes.highest or 0)
    return RankTelemetry(
        rank=clock.rank,
        host=clock.host,
        num_steps=clock.num_steps,
        num_rows=clock.num_rows,
        rows_per_s=rows_per_s(clock),
        phases={str(name): phase for name, phase in clock.phases.items()},
        step_p50_s=clock.step_p50_s,
        step_p95_s=clock.step_p95_s,
        wire_bytes=clock.wire_bytes,
        cpu_s=max(clock.cpu_s, processes.cpu_s),
        peak_memory_bytes=max(clock.peak_memory_bytes, sampled_bytes),
        major_faults=clock.major_faults,
        preemptions=clock.preemptions,
        busy_cores_mean=processes.busy_cores.mean,
        busy_cores_max=processes.busy_cores.highest,
        disk_read_bytes=processes.disk_read_bytes if processes.was_seen else None,
        disk_written_bytes=processes.disk_written_bytes if processes.was_seen else None,
    )
