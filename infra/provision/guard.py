"""Run a command and end it, with every process it started, when set-up ends.

Called as `python guard.py COMMAND...` with standard input held open by set-up: a kill of set-up
closes it. The guard also inherits set-up's file locks, so that no second set-up starts before the
first one's compilers are gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def guard(command: Sequence[str]) -> int:
    """Run `command` in a process group of its own; return its exit code as a shell would."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def end_with_setup() -> None:
        os.read(0, 1)  # returns when the other end is closed
        os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=end_with_setup, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
