"""The prediction log under kill -9, several processes, a full disk, and damaged parts."""

import random
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.reading import ReadTally
from tasks.predictions.schema import ASIDE, model_folder
from tasks.predictions.segments import SegmentWriter
from tasks.predictions.upkeep import keep_up
from tests.support.host.disks import small_disk
from tests.support.host.processes import python, wait_until
from tests.support.serving.prediction_writer import MODEL, batch
from tests.support.serving.served_rows import open_log, rows_of

pytestmark = pytest.mark.timeout(300)


def start_writer(home: Path, name: str) -> subprocess.Popen[str]:
    module = "tests.support.serving.prediction_writer"
    return python("-m", module, str(home), name, stdout=subprocess.PIPE)


def kill(process: subprocess.Popen[str]) -> int:
    """Kill -9; the rows that it said were on the disk."""
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    lines = [line for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return int(lines[-1]) if lines else 0


WANTED = ["request_id", "score", "f:temp"]


def test_two_writers_killed_at_any_moment_leave_whole_parts_and_no_row_twice(
    tmp_path: Path,
) -> None:
    draw, told = random.Random(7), {}
    for attempt in range(3):
        names = [f"a{attempt}", f"b{attempt}"]
        writers = {name: start_writer(tmp_path, name) for name in names}
        for writer in writers.values():  # both write before either is killed
            assert writer.stdout.readline().strip().isdigit()
        for name, writer in writers.items():
            time.sleep(draw.uniform(0.1, 0.8))  # to somewhere in a write or a merge
            told[name] = kill(writer)

    tally = ReadTally()
    rows = rows_of(tmp_path, WANTED, tally)
    assert tally.damaged == []
    assert not rows["request_id"].duplicated().any()
    for name, least in told.items():
        mine = rows[rows["request_id"].str.startswith(f"{name}-")]
        numbers = sorted(mine["request_id"].str.split("-").str[1].astype(int))
        assert numbers == list(range(len(numbers))), f"{name} lost rows in the middle"
        assert len(numbers) >= least
        assert (mine["score"] == mine["f:temp"]).all()

    with SegmentWriter(tmp_path) as writer:  # what the next server does at its start
        assert not list(tmp_path.rglob(f"{ASIDE}*"))
        keep_up(tmp_path, writer, PredictionLogConfig(), datetime.now(UTC) + timedelta(days=2))
    folder = model_folder(tmp_path, MODEL)
    assert len(list(folder.glob("day=*/*.parquet"))) == len(list(folder.glob("day=*")))
    after = rows_of(tmp_path, WANTED)
    assert set(after["request_id"]) == set(rows["request_id"])
    assert len(after) == len(rows)


def test_a_full_disk_costs_no_row_that_memory_can_hold(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with small_disk(home, 3_000_000) as disk:
        with open_log(home, flush_s=0.05, queue_rows=1000) as log:
            with disk.filled():
                log.served(batch("r", 0))
                wait_until(lambda: log.counters()["write_failures"], "a failed write", 60)
                assert log.counters()["failing"] == 1
                for first in range(16, 1600, 16):
                    log.served(batch("r", first))
                assert not list(home.rglob("*.parquet"))
                assert not list(home.rglob(f"{ASIDE}*"))
        counters = log.counters()
        assert counters["dropped_rows"]["disk"] == 1600 - counters["logged_rows"]
        assert counters["logged_rows"] == 992
        assert counters["failing"] == 0
        assert len(rows_of(home, WANTED)) == 992


def test_a_damaged_part_is_named_set_aside_and_costs_no_other(tmp_path: Path) -> None:
    for number in range(3):
        with open_log(tmp_path) as log:
            log.served(batch(f"r{number}", 0))
    folder = model_folder(tmp_path, MODEL)
    first, second, _ = sorted(folder.glob("day=*/part-*.parquet"))
    content = bytearray(first.read_bytes())
    content[len(content) // 3] ^= 0xFF
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-100])

    tally = ReadTally()
    rows = rows_of(tmp_path, WANTED, tally)
    assert len(tally.damaged) >= 1
    assert any(str(second) in sentence and "is damaged" in sentence for sentence in tally.damaged)
    assert len(rows) in (16, 32)  # the first may be hurt in a column that was not asked for

    with SegmentWriter(tmp_path) as writer:
        keep_up(tmp_path, writer, PredictionLogConfig(), datetime.now(UTC) + timedelta(days=2))
    assert len(list((tmp_path / "predictions" / "damaged").iterdir())) == 2
    assert len(rows_of(tmp_path, WANTED)) == 16
