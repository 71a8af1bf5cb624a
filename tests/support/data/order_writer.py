"""A shop that goes on selling: a process that appends the orders of one more hour for each line.

`python -m tests.support.data.order_writer FOLDER FIRST_HOUR` writes `FOLDER/<hour>.parquet` aside,
renames it, and says the hour. A line with a number says which hour after the first is written next.
"""

import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd


def orders_of(hour: datetime, seed: int) -> pd.DataFrame:
    """Some orders of one hour."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(3, 9))
    seconds = np.sort(rng.integers(0, 3600, num_rows))
    return pd.DataFrame(
        {
            "order_id": seed * 100 + np.arange(num_rows),
            "customer": [f"c{n:02d}" for n in rng.integers(0, 40, num_rows)],
            "ordered": pd.Timestamp(hour) + pd.to_timedelta(seconds, unit="s"),
            "items": rng.integers(1, 6, num_rows),
            "amount": np.round(rng.gamma(9, 2, num_rows), 2),
        }
    )


def main() -> None:
    """Write an hour for each line that is read."""
    folder, first = Path(sys.argv[1]), datetime.fromisoformat(sys.argv[2])
    for number, line in enumerate(sys.stdin):
        hour = first + timedelta(hours=int(line))
        name = f"{hour:%Y-%m-%dT%H}-{number}.parquet"
        orders_of(hour, number).to_parquet(folder / f".{name}")
        (folder / f".{name}").rename(folder / name)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
