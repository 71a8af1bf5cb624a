"""How many ranks a run gets: what the probe must know of it, read from the snapshot."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.contracts.data import DatasetSchema, DataSplits
from tasks.training.config import TrainingConfig
from tasks.training.launch.host import Host
from tasks.training.launch.nursery import Nursery
from tasks.training.launch.probe import RankPlan, decide_ranks
from tasks.training.launch.probe_job import ProbeJob
from tasks.training.schedule import StepPlan


def plan_ranks(
    snapshot: Path,
    columns: DatasetSchema,
    splits: DataSplits,
    config: TrainingConfig,
    cache: Path,
    nursery: Nursery | None,
) -> RankPlan:
    """Ranks and threads for a run on this host: as configured, one a GPU, or measured.

    Args:
        snapshot: the rows, Parquet.
        columns: which column is what.
        splits: which rows are for training.
        config: what is asked for.
        cache: folder in which what was measured is kept.
        nursery: where to fork the probe's ranks.

    Raises:
        TransientError: the ranks of a probe ended or did not answer.
    """
    job = ProbeJob(
        category_sizes=_category_sizes(snapshot, columns) if _may_probe(config) else (),
        num_numbers=len(columns.numeric),
        rows_per_step=config.global_batch_size,
        num_steps=_num_steps(snapshot, columns, splits, config),
        training=config,
        strategy=config.strategy,
    )
    return decide_ranks(job, config.launch, config.device, Host.of_this_process(), cache, nursery)


def _may_probe(config: TrainingConfig) -> bool:
    return config.launch.ranks == "auto" and config.device == "cpu"


def _category_sizes(snapshot: Path, columns: DatasetSchema) -> tuple[int, ...]:
    """Values of each category column, whatever the window: enough for a guess at the speed."""
    table = pq.read_table(snapshot, columns=list(columns.categorical), use_threads=False)
    return tuple(max(1, pc.count_distinct(table[name]).as_py()) for name in columns.categorical)


def _num_steps(
    snapshot: Path, columns: DatasetSchema, splits: DataSplits, config: TrainingConfig
) -> int:
    """Steps of all epochs, for training rows spread evenly over the snapshot's shards."""
    times = pq.read_table(snapshot, columns=[columns.event_time], use_threads=False)
    moments = times[columns.event_time]
    inside = pc.and_(
        pc.greater_equal(moments, splits.train.start), pc.less(moments, splits.train.end)
    )
    rows = int(pc.sum(inside).as_py() or 0)
    plan = StepPlan.of(max(1, rows // config.num_shards), config)
    return config.max_epochs * plan.num_steps
