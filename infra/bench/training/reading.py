"""What training from Parquet on disk takes: time that ranks wait for rows, and their memory.

The finished loop's snapshot is repeated ten times, each copy a year later, into one Parquet file of
row groups like the snapshot's own. Two single-thread ranks train the default network on it for an
epoch. The state folder is only read.
"""

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from infra.bench.training.trainings import Trainings, two_ranks
from tasks.contracts.data import DatasetSchema, DataSplits, FeatureSnapshot
from tasks.kernel.settings import StagedFolder, content_key
from tasks.training.config import TrainingConfig

YEAR, HELD_OUT = timedelta(days=365), timedelta(days=30)


def figures(bench: Bench) -> Measured:
    """Measure with the snapshot of the newest finished loop."""
    trainings, num_copies = Trainings(bench), bench.size(10, 2)
    snapshot = trainings.dataset.snapshot
    source = trainings.store.path(snapshot.data)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        write_copies(source, snapshot.columns, folder.path / "rows.parquet", num_copies)
        return snapshot.model_copy(update={"data": folder.artifact("rows.parquet")})

    copies = trainings.store.build_once("copies", content_key(num_copies), FeatureSnapshot, build)
    end = snapshot.window.end + (num_copies - 1) * YEAR
    model = trainings.train(
        two_ranks(TrainingConfig(max_epochs=1)),
        dataset=trainings.dataset.model_copy(update={"snapshot": copies}),
        # All but the last month is for training; what follows on it holds no rows.
        splits=DataSplits.between(snapshot.window.start, end - HELD_OUT, end, end + HELD_OUT),
    )
    assert model.telemetry
    ranks = model.telemetry.ranks
    waited = max(
        rank.phases["data"].steady_s
        / sum(rank.phases[name].steady_s for name in ("data", "compute", "exchange"))
        for rank in ranks
    )
    peak = max(rank.peak_memory_bytes for rank in ranks)
    speed = model.epochs[0].rows_per_s
    on_disk = f"the Parquet file takes {copies.data.num_bytes / 1e9:.2f}"
    return [
        at_most("ranks wait for rows, share of steps", waited, 0.1, f"{speed:,.0f} rows/s"),
        at_most("resident memory of a rank, GB", peak / 1e9, 1.5, on_disk),
    ]


def write_copies(source: Path, columns: DatasetSchema, target: Path, num_copies: int) -> None:
    """Write copies of a snapshot's rows, each a year later, ids made unique."""
    table = pq.read_table(source)
    times, ids = (table.schema.get_field_index(n) for n in (columns.event_time, columns.row_id))
    names = table.column(ids).cast(pa.string())
    schema = table.schema.set(ids, pa.field(columns.row_id, pa.string()))
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for copy in range(num_copies):
            shift = pa.scalar(copy * YEAR, pa.duration("us"))
            later = pc.add(table.column(times), shift)
            named = pc.binary_join_element_wise(names, str(copy), "/")
            shifted = table.set_column(times, table.schema.field(times), later)
            writer.write_table(shifted.set_column(ids, schema.field(ids), named), 8192)
