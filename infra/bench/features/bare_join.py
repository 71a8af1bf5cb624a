"""The point-in-time join of the bench as one would write it by hand, on polars alone.

    python -m infra.bench.features.bare_join VIEWS FRAME TARGET

Nothing of Feast or of this project is loaded beside it, so its memory is that of the join.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl

from infra.bench.features.cost import measured


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


if __name__ == "__main__":
    views_file, frame_file, target_file = map(Path, sys.argv[1:])
    described = json.loads(views_file.read_text())
    measured(target_file, lambda: joined(described, frame_file), pl.DataFrame.write_parquet)
