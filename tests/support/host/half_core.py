"""A slow processor for real processes: a control group that gets half of one core."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PERIOD_US = 100_000
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HalfCore:
    """A control group; what is started by its command stays inside, and so do its children."""

    folder: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, begun inside the group."""
        enter = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    @property
    def num_throttled(self) -> int:
        """Periods in which the processes inside had used up their share."""
        lines = (self.folder / "cpu.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["nr_throttled"])


@contextmanager
def half_a_core() -> Iterator[HalfCore]:
    """A group of its own, of version 1 or 2; skips where none may be made."""
    version_1 = GROUPS / "cpu"
    folder = (version_1 if version_1.is_dir() else GROUPS) / f"falaj-half-core-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"half a core needs a control group of its own: {exc}")
    try:
        try:
            _limit(folder)
        except OSError as exc:
            pytest.skip(f"half a core needs a control group that bounds processors: {exc}")
        yield HalfCore(folder)
    finally:
        folder.rmdir()


def _limit(folder: Path) -> None:
    if (folder / "cpu.cfs_quota_us").exists():
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 2))
    elif (folder / "cpu.max").exists():  # version 2, where the parent hands the controller down
        (folder / "cpu.max").write_text(f"{PERIOD_US // 2} {PERIOD_US}")
    else:
        raise FileNotFoundError(f"{folder} has neither cpu.cfs_quota_us nor cpu.max")
