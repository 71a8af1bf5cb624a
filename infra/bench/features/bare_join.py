"""The point-in-time join of the bench as one would write it by hand, on polars alone.

    python -m infra.bench.features.bare_join VIEWS FRAME TARGET

Nothing of Feast or of this project is loaded beside it, so its memory is that of the join.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

T = TypeVar("T")


def joined(views: list[dict[str, Any]], frame: Path) -> pl.DataFrame:
    """Every row of the frame with the features of each view that were known at its moment."""
    result = pl.scan_parquet(frame).sort("event_timestamp")
    for view in views:
        named = {f: f"{view['name']}__{f}" for f in view["features"]}
        rows = (
            pl.scan_parquet(f"{view['folder']}/*.parquet")
            .select(*view["keys"], "event_timestamp", "created", *named)
            .with_columns(available=pl.max_horizontal("event_timestamp", "created"))
            .rename({**named, "event_timestamp": "event"})
            .drop("created")
            .sort("available")
        )
        result = result.join_asof(
            rows,
            left_on="event_timestamp",
            right_on="available",
            by=view["keys"],
            check_sortedness=False,
        )
        if view["ttl_s"]:
            oldest = pl.col("event_timestamp") - pl.duration(seconds=view["ttl_s"])
            fresh = pl.when(pl.col("event") >= oldest)
            result = result.with_columns(fresh.then(pl.col(c)).alias(c) for c in named.values())
        result = result.drop("event", "available", strict=False)
    return result.collect()


def measured(target: Path, work: Callable[[], T], write: Callable[[T, Path], object]) -> None:
    """Do it; its cost is written beside `target` as JSON, and what it returns to `target`.

    CPU is that of the whole process, threads and kernel included, from the call to its result;
    memory is the highest resident size of the whole process, imports included.
    """
    before = time.process_time()
    result = work()
    cpu_s = time.process_time() - before
    status = Path("/proc/self/status").read_text()  # `getrusage` includes the parent's memory
    peak_bytes = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024
    if result is not None:
        write(result, target)
    num_rows = pl.scan_parquet(target).select(pl.len()).collect().item()
    target.with_suffix(".json").write_text(json.dumps([cpu_s, peak_bytes, num_rows]))


if __name__ == "__main__":
    views_file, frame_file, target_file = map(Path, sys.argv[1:])
    described = json.loads(views_file.read_text())
    measured(target_file, lambda: joined(described, frame_file), pl.DataFrame.write_parquet)
