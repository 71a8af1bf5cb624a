"""What is common to all processes of ranks, local or not: what they inherit, print and end with."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import IO

from tasks.kernel import errors
from tasks.kernel.errors import FalajError, TrainingError
from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch.guard import END_WITHIN_S

# Everything else in the driver's environment may be a secret and stays there. FALAJ_LEASE tells
# under which lease a process runs, so that devices are not given on while it still does.
INHERITED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "FALAJ_LEASE",
)  # fmt: skip
READ_BYTES = 65536
MAX_LINE_BYTES = 1 << 20


def inherited_environment(driver: Mapping[str, str]) -> dict[str, str]:
    """What ranks may see of the driver's environment, and where the project is."""
    allowed = {name: driver[name] for name in INHERITED_VARIABLES if name in driver}
    return {**allowed, "PYTHONPATH": str(PROJECT_ROOT), "PYTHONUNBUFFERED": "1"}


class Lines:
    """Splits what a pipe delivers into lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self.is_open = True
        self._partial = b""
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> list[bytes]:
        """Whole lines that have come; the last one without its end when the pipe closes."""
        chunk = self.pipe.read(READ_BYTES)
        if chunk is None:
            return []
        if chunk == b"":
            self.is_open = False
            return [self._partial] if self._partial else []
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        return whole


def end_guard(guarding: subprocess.Popen[bytes]) -> None:
    """Ask a guard to end what it guards, and wait until all of it is gone."""
    guarding.terminate()
    try:
        guarding.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:  # what it guards dies with it
        guarding.kill()
        guarding.wait()


def end_in_words(code: int) -> str:
    """Why a rank is gone that reported nothing, as a clause; 128 plus n where signal n ended it."""
    if code == 128 + signal.SIGKILL:
        return "was killed (signal 9; out of memory?)"
    if code > 128:
        return f"was ended by signal {code - 128} ({signal.strsignal(code - 128)})"
    return f"ended with exit code {code} and without a report"


OUR_KINDS: dict[str, type[FalajError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, FalajError)
}


def error_of_rank(who: str, kind: str, message: str, traceback: str) -> FalajError:
    """A rank's own error: of the same kind where it is one of ours, else a `TrainingError`."""
    error = OUR_KINDS.get(kind, TrainingError)(f"{who}: {kind}: {message}")
    error.add_note(f"Traceback of {who}:\n{traceback}")
    return error
