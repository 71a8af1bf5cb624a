"""What a diagnosis has to know of a run, out of its configuration and its host."""

from __future__ import annotations

import os

from tasks.training.config import TrainingConfig
from tasks.training.telemetry.diagnosis import JobFacts
from tasks.training.telemetry.host import computes_bf16


def job_facts(
    config: TrainingConfig,
    num_ranks: int,
    threads_per_rank: int,
    reading_mode: str,
    num_hosts: int = 1,
) -> JobFacts:
    """Facts of a run on this host, or on hosts like it.

    Args:
        config: of the run.
        num_ranks: ranks that took part, however they were chosen.
        threads_per_rank: of each.
        reading_mode: `memory` or `stream`, as it was carried out.
        num_hosts: hosts of the ranks.
    """
    strategy = config.strategy
    return JobFacts(
        num_ranks=num_ranks,
        threads_per_rank=threads_per_rank,
        global_batch_size=config.global_batch_size,
        num_shards=config.num_shards,
        num_cores=len(os.sched_getaffinity(0)),
        device=config.device,
        num_hosts=num_hosts,
        precision=strategy.precision,
        has_bf16=config.device == "cpu" and computes_bf16(),
        accumulation_steps=strategy.accumulation_steps,
        gradient_compression=strategy.gradient_compression,
        reading_mode=reading_mode,
    )
