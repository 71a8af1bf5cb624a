"""Windows of the log, its upkeep, and the command."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from falaj.context import Context
from falaj.data import predictions as app
from serving.errors import OverloadedError
from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings
from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.reading import LogQuery, ReadTally, read_rows
from tasks.predictions.schema import log_root, mask_key_file, model_folder, open_mask
from tasks.predictions.segments import SegmentWriter, folder_held, visible_segments
from tasks.predictions.upkeep import keep_up
from tests.support.data.builders import frame
from tests.support.serving.served_rows import MODEL, NOW, batch_of, call, open_log, rows_of, served

FRAME = frame(100)
DAY = timedelta(days=1)


def log(home: Path, *batches: Any, **config: Any) -> None:
    with open_log(home, **config) as opened:
        for batch in batches:
            opened.served(batch)


def three_days(home: Path) -> None:
    """Ten rows a day, each day by two versions; one part for each."""
    for day in range(3):
        for version, track in (("1", "stable"), ("2", "candidate")):
            ids = [f"{day}-{version}-{n}" for n in range(5)]
            by = served(version, track)  # type: ignore[arg-type]
            log(home, batch_of(FRAME.head(5), ids, by, at=NOW + day * DAY, subject=f"s{day}"))


def upkeep(home: Path, now: datetime = NOW + 10 * DAY, **config: Any) -> None:
    with SegmentWriter(home) as writer:
        keep_up(home, writer, PredictionLogConfig(**config), now)


def parts(home: Path) -> list[Path]:
    return sorted(model_folder(home, MODEL).glob("day=*/*.parquet"))


def test_a_window_of_a_version_is_read_and_nothing_else_is_opened(tmp_path: Path) -> None:
    three_days(tmp_path)
    window = TimeWindow(start=NOW + DAY, end=NOW + 2 * DAY)
    tally = ReadTally()
    wanted = {"window": window, "versions": ["2"], "tracks": ["candidate"]}
    rows = rows_of(tmp_path, ["request_id", "f:temp"], tally, **wanted)
    assert rows["request_id"].tolist() == [f"1-2-{n}" for n in range(5)]
    assert tally.parts == 4  # of the two days that the window meets
    assert len(rows_of(tmp_path)) == 30
    assert rows_of(tmp_path, model="other").empty


def test_finished_days_become_one_part_and_old_ones_go(tmp_path: Path) -> None:
    three_days(tmp_path)
    before = rows_of(tmp_path)
    upkeep(tmp_path)
    assert len(parts(tmp_path)) == 3
    after = rows_of(tmp_path)
    pd.testing.assert_frame_equal(
        *(f.sort_values("request_id").reset_index(drop=True) for f in (before, after))
    )
    upkeep(tmp_path, now=NOW + 10 * DAY, retention_days=9)
    days = {part.parent.name for part in parts(tmp_path)}
    assert days == {f"day={(NOW + n * DAY).date()}" for n in (1, 2)}
    assert not list(log_root(tmp_path).rglob(".old-*"))


def test_the_present_day_is_merged_only_when_it_has_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_days(tmp_path)
    upkeep(tmp_path, now=NOW + timedelta(hours=1))
    assert len(parts(tmp_path)) == 6
    monkeypatch.setattr("tasks.predictions.upkeep.COMPACT_SEGMENTS", 2)
    upkeep(tmp_path, now=NOW + timedelta(hours=1))
    assert len(parts(tmp_path)) == 3


def test_a_replaced_part_that_a_kill_left_counts_once_and_goes(tmp_path: Path) -> None:
    three_days(tmp_path)
    old = {part: part.read_bytes() for part in parts(tmp_path)}
    upkeep(tmp_path)
    for part, content in old.items():
        part.write_bytes(content)
    assert len(rows_of(tmp_path)) == 30
    assert len(visible_segments(parts(tmp_path)[0].parent)) == 1
    three_days(tmp_path)
    upkeep(tmp_path)
    assert len(parts(tmp_path)) == 3
    assert len(rows_of(tmp_path)) == 60


def test_parts_are_not_merged_while_somebody_reads(tmp_path: Path) -> None:
    three_days(tmp_path)
    rows = read_rows(tmp_path, LogQuery(MODEL), ["request_id"])
    next(rows)
    upkeep(tmp_path)
    assert len(parts(tmp_path)) == 6
    assert sum(table.num_rows for table in rows) == 25
    with folder_held(model_folder(tmp_path, MODEL), exclusive=True, wait=False) as held:
        assert held


def test_a_field_that_was_masked_later_does_not_keep_parts_from_being_read(tmp_path: Path) -> None:
    log(tmp_path, batch_of(FRAME.head(3), ["a", "b", "c"]))
    log(tmp_path, batch_of(FRAME.head(3), ["d", "e", "f"]), masked=("carrier",))
    rows = rows_of(tmp_path, ["request_id", "f:carrier"])
    assert rows["f:carrier"].isna().sum() == 3
    upkeep(tmp_path)
    assert len(parts(tmp_path)) == 2  # their columns differ in type
    assert len(rows_of(tmp_path)) == 6


def run(home: Path, *words: str) -> list[str]:
    command, bound, _ = app.parse_args(words, exit_on_error=False)
    context = Context(Settings.from_environment({"FALAJ_HOME": str(home)}), assume_yes=True)
    shown = command(*bound.args, **bound.kwargs, context=context)
    return list(shown.lines)


def test_the_command_counts_exports_and_labels(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run(home, "counts") == ["No request is logged there."]
    three_days(home)
    with open_log(home) as opened:
        opened.refused(call(1, "r"), OverloadedError("full"))
    counted = "\n".join(run(home, "counts"))
    assert "nobody as stable: 0 answered, 1 refused" in counted
    for by in ("version 1 as stable", "version 2 as candidate"):
        assert f"{by} by onnx-fp32: 15 answered; " in counted
    labels = tmp_path / "labels.parquet"
    pd.DataFrame({"request_id": ["0-1-0", "x"], "label": [1, 0]}).to_parquet(labels)
    assert "2 by request" in run(home, "label", MODEL, str(labels))[0]
    lines = run(
        home, "export", MODEL, str(tmp_path / "out.parquet"), "--labels", "--track", "stable"
    )
    assert "15 rows" in lines[0]
    assert "1 rows have one, 14 none" in lines[1]
    exported = pd.read_parquet(tmp_path / "out.parquet")
    assert exported["label"].notna().sum() == 1
    window = ["--start", f"{NOW:%Y-%m-%dT%H:%MZ}", "--end", f"{NOW + DAY:%Y-%m-%dT%H:%MZ}"]
    run(home, "export", MODEL, str(tmp_path / "out.csv"), *window)
    assert len(pd.read_csv(tmp_path / "out.csv")) == 10
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("out.*")} == {0o600}


def test_the_key_of_the_mask_is_its_owners_alone(tmp_path: Path) -> None:
    told = open_mask(tmp_path).text("carol")
    assert open_mask(tmp_path).text("carol") == told
    assert open_mask(tmp_path / "elsewhere").text("carol") != told
    file = mask_key_file(tmp_path)
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="may be read by others"):
        open_mask(tmp_path)
    file.chmod(0o600)
    file.write_text("cut")
    with pytest.raises(ConfigurationError, match="expected 32 in hexadecimal"):
        open_mask(tmp_path)
