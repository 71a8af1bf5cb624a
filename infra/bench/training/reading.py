"""Training from Parquet on disk against training with everything in memory.

The finished loop's snapshot is repeated ten times, each copy a year later, into one Parquet file of
row groups like the snapshot's own. Two pinned single-thread ranks train the default network on it:
in one run both kinds of reading in turn, for the ratio of their rows a second; in another from
files alone, for a rank's memory. The state folder is only read.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infra.bench.figures import Measured, at_least, at_most
from infra.bench.parts import Bench, newest_record
from infra.bench.training.rank_processes import NUM_RANKS, run_ranks
from infra.bench.training.reading_rank import STEPS
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, DataSplits, FeatureSnapshot
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import RunDirectory, TrainingJob

RANK_MODULE = "infra.bench.training.reading_rank"
NUM_COPIES = 10
GROUP_ROWS = 8192
YEAR = timedelta(days=365)
HELD_OUT = timedelta(days=30)
MODES = ("memory", "stream")


def figures(bench: Bench) -> Measured:
    """Measure with the snapshot of the newest finished loop."""
    settings, folder = bench.settings, bench.folder
    snapshot = newest_record(settings).dataset.snapshot
    path, steps = folder / "tenfold.parquet", bench.size(STEPS, 8)
    num_rows = write_copies(settings.store.path(snapshot.data), snapshot.columns, path)
    job = _job(path, snapshot)
    speed, memory = (
        [json.loads(text) for text in _run_ranks(folder / what, job, what, steps)]
        for what in ("speed", "memory")
    )
    return _figures(speed, memory, num_rows, path, steps * job.config.global_batch_size)


def write_copies(source: Path, columns: DatasetSchema, target: Path) -> int:
    """Write `NUM_COPIES` copies of a snapshot's rows, each a year later, ids made unique."""
    table = pq.read_table(source)
    times, ids = (table.schema.get_field_index(n) for n in (columns.event_time, columns.row_id))
    with pq.ParquetWriter(target, table.schema, compression="zstd") as writer:
        for copy in range(NUM_COPIES):
            shift = pa.scalar(copy * YEAR, pa.duration("us"))
            later = pc.add(table.column(times), shift)
            named = pc.binary_join_element_wise(table.column(ids).cast(pa.string()), str(copy), "/")
            shifted = table.set_column(times, table.schema.field(times), later)
            shifted = shifted.set_column(ids, table.schema.field(ids), named)
            writer.write_table(shifted, row_group_size=GROUP_ROWS)
    return NUM_COPIES * int(table.num_rows)


def _job(path: Path, snapshot: FeatureSnapshot) -> TrainingJob:
    """All but the last month is for training; what follows on it holds no rows."""
    start, end = snapshot.window.start, snapshot.window.end + (NUM_COPIES - 1) * YEAR
    splits = DataSplits(
        train=TimeWindow(start=start, end=end - HELD_OUT),
        validation=TimeWindow(start=end - HELD_OUT, end=end),
        test=TimeWindow(start=end, end=end + HELD_OUT),
    )
    return TrainingJob(
        snapshot_path=path, columns=snapshot.columns, splits=splits, config=TrainingConfig()
    )


def _run_ranks(path: Path, job: TrainingJob, what: str, steps: int) -> list[str]:
    """Let the ranks measure, and return what each of them wrote."""
    run = RunDirectory(path)
    run.prepare(job)
    (path / "what").write_text(f"{what} {steps}")
    run_ranks(RANK_MODULE, path)
    return [(path / f"measured-{rank}.json").read_text() for rank in range(NUM_RANKS)]


def _figures(
    speed: list[dict[str, dict[str, float]]],
    memory: list[dict[str, int]],
    num_rows: int,
    path: Path,
    num_trained: int,
) -> Measured:
    # Ranks wait for each other in every step, so all take the same wall time.
    wall_s, cpu_s, opened_s = (
        {mode: sum(of_rank[mode][what] for of_rank in speed) / NUM_RANKS for mode in MODES}
        for what in ("wall_s", "cpu_s", "opened_s")
    )
    resident = max(of_rank["peak_bytes"] for of_rank in memory)
    anonymous = max(of_rank["peak_anonymous_bytes"] for of_rank in memory)
    decoded = sum(of_rank["decoded_bytes"] for of_rank in memory)
    return [
        at_least(
            "rows/s from Parquet on disk to in memory",
            wall_s["memory"] / wall_s["stream"],
            0.9,
            f"{num_trained / wall_s['stream']:,.0f} to {num_trained / wall_s['memory']:,.0f}, of "
            f"{num_rows:,} rows; by CPU seconds {cpu_s['memory'] / cpu_s['stream']:.3f}; opened in "
            f"{opened_s['stream']:.1f} to {opened_s['memory']:.1f} s",
        ),
        at_most(
            "resident memory of a rank that streams, GB",
            resident / 1e9,
            1.5,
            f"{anonymous / 1e9:.2f} without file pages; decoded rows take {decoded / 1e9:.2f} GB "
            f"of disk, the Parquet file {path.stat().st_size / 1e9:.2f}",
        ),
    ]
