"""New hours arrive while refreshes follow them: each reads what is new, and no history again."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, LandedRows
from tasks.features.tables.build import EMPTY, build_feature_tables
from tests.support.data.repository import vouched
from tests.support.services.raw_sources import SourceShop, seen

HISTORY = 24
FIRST = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=HISTORY + 4)
Append = Callable[[int], Path]


@pytest.fixture
def shop(tmp_path: Path) -> SourceShop:
    shop = SourceShop(tmp_path)
    shop.source("raw/orders/")
    return shop


@pytest.fixture
def append(shop: SourceShop) -> Iterator[Append]:
    """A process that writes one hour's orders, told which."""
    line = [sys.executable, "-m", "tests.support.data.order_writer", str(shop.folder)]
    with subprocess.Popen(
        [*line, FIRST.isoformat()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin
        assert writer.stdout

        def written(hour: int) -> Path:
            assert writer.stdin
            assert writer.stdout
            writer.stdin.write(f"{hour}\n")
            writer.stdin.flush()
            return shop.folder / writer.stdout.readline().strip()

        yield written
        writer.stdin.close()


def hours(first: int, count: int = 1) -> TimeWindow:
    start = FIRST + timedelta(hours=first)
    return TimeWindow(start=start, end=start + timedelta(hours=count))


def refreshed(
    shop: SourceShop, window: TimeWindow, base: FeatureTables
) -> tuple[FeatureTables, LandedRows]:
    landed = shop.read(window=window)
    features = shop.config.features
    made = build_feature_tables(vouched(landed), base, features, shop.repo, shop.store)
    return made, landed


def test_each_new_hour_is_read_alone_and_late_rows_are_found(
    shop: SourceShop, append: Append
) -> None:
    history = [append(hour) for hour in range(HISTORY)]
    tables, landed = refreshed(shop, hours(0, HISTORY), EMPTY)
    assert seen(landed).num_bytes == sum(file.stat().st_size for file in history)
    for hour in range(HISTORY, HISTORY + 3):
        file = append(hour)
        tables, landed = refreshed(shop, hours(hour), tables)
        assert seen(landed).num_bytes == file.stat().st_size
        assert landed.tables[0].num_rows == len(pd.read_parquet(file))
    earlier = hours(HISTORY - 5)
    before = shop.read(window=earlier).tables[0].num_rows
    late = append(HISTORY - 5)
    tables, landed = refreshed(shop, earlier, tables)
    assert landed.tables[0].num_rows == before + len(pd.read_parquet(late))
    at_once, _ = refreshed(shop, hours(0, HISTORY + 3), EMPTY)
    assert tables.version == at_once.version
