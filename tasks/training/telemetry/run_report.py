"""The telemetry of a finished run with its diagnosis, from everything in the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.contracts.telemetry import TrainingTelemetry
from tasks.training.telemetry.diagnosis import JobFacts, diagnose
from tasks.training.telemetry.profiler import TIMELINE, read_profiles
from tasks.training.telemetry.sampler import TelemetrySampler
from tasks.training.telemetry.trace import read_timeline


def run_telemetry(
    sampler: TelemetrySampler, folder: Path, job: JobFacts, applied: Sequence[str] = ()
) -> TrainingTelemetry:
    """What a run took and what held it back; to be asked for when its ranks have ended well.

    Args:
        sampler: that sampled the run, left.
        folder: the run directory.
        job: how the run was carried out.
        applied: settings that were taken over from an earlier diagnosis, in sentences.
    """
    told = sampler.result(applied)
    profiles, stages = read_profiles(folder), read_timeline(folder / TIMELINE)
    diagnosis = diagnose(told.ranks, told.host, job, profiles, stages)
    return told.model_copy(update={"diagnosis": diagnosis})
