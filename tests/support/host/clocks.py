"""A clock that jumps, for real processes: servers, workers, databases, whatever is started with it.

A small library is preloaded that adds to each answer of the machine's clock; nobody else's clock is
touched. It is compiled when it is first needed, by the compiler that set-up needs too.
"""

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("clock_shift.c")


@dataclass(frozen=True)
class Clock:
    """A clock of its own for some processes; right until it is set."""

    library: Path
    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """With this a process goes by this clock, and so does all that it starts."""
        return {"LD_PRELOAD": str(self.library)}

    def jump_to(self, hours: float) -> None:
        """Be wrong by so many hours from now on: ahead where positive."""
        with self.file.open("r+b") as stream:
            stream.write(struct.pack("q", int(hours * 3600)))


def make_clock(folder: Path, seen: Path | None = None) -> Clock:
    """A clock that is right at first; skips where it cannot be made.

    Args:
        folder: existing, for the library and the file that says how wrong the clock is.
        seen: where the processes see that folder.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a clock of its own needs a C compiler")
    clock = Clock(folder / "clock_shift.so", folder / "clock")
    clock.file.write_bytes(struct.pack("q", 0))
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(clock.library)]
    command.append(f'-DCLOCK_FILE="{(seen or folder) / clock.file.name}"')
    subprocess.run([*command, str(SOURCE), "-ldl"], check=True)
    return Clock((seen or folder) / clock.library.name, clock.file)
