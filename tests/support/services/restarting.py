"""Servers that are ended and started again, with the same data, at the same address."""

import signal
import subprocess
import time
from dataclasses import dataclass

import psutil

from tasks.kernel.guard import die_with_parent

STARTED: list[subprocess.Popen[bytes]] = []


@dataclass
class Server:
    """A process that can be ended and started again, with the same data, at the same address."""

    command: tuple[str, ...]
    pid: int

    def restart(self, number: signal.Signals, away_s: float) -> None:
        """End it with a signal, leave it away for a while, and start it again."""
        process = psutil.Process(self.pid)
        folder, user, group = process.cwd(), process.uids().real, process.gids().real
        family = [process, *process.children(recursive=True)]
        process.send_signal(number)
        psutil.wait_procs(family, 60)
        time.sleep(away_s)
        again = subprocess.Popen(
            self.command,
            cwd=folder,
            user=user,
            group=group,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        STARTED.append(again)
        self.pid = again.pid


def end_started() -> None:
    for process in STARTED:
        process.kill()
        process.wait(60)
