"""Guard process: nothing that a command starts outlives the guard or the guard's parent (Linux).

Usage: python -S guard.py PARENT_PID GRACE_S -- COMMAND...

Start it as a direct child, in the caller's process group, from a thread that stays. It ends, with
all descendants of the command, when the command ends, when it is sent SIGTERM, SIGINT or SIGHUP, or
when its parent dies, by kill -9 too. Descendants get SIGTERM, and SIGKILL after the grace. It exits
with the command's code, or 128 plus the number of the signal that ended the command or the guard.

A process that forks, see `fork_server.py`, calls `run_guarded` in the fork instead.

Only the standard library is used, so that it starts in a few milliseconds.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
WATCHED_SIGNALS = STOP_SIGNALS | {signal.SIGCHLD}
GRACE_S = 5.0
KILL_WAIT_S = 5.0
# A guard gives its command the grace, then kills; what is not gone by then, it will not end.
END_WITHIN_S = GRACE_S + KILL_WAIT_S + 1
POLL_S = 0.05
FIRST_OTHER_DESCRIPTOR = 3  # after standard input, output and error
CANNOT_BE_STARTED = 127

PR_SET_PDEATHSIG = 1  # ask for a signal when the parent dies
PR_SET_CHILD_SUBREAPER = 36  # orphaned descendants become our children

LIBC = ctypes.CDLL(None)


class Guard:
    """Runs one child and answers for everything that it starts.

    Args:
        become: what the child does, in a session of its own and with nothing open but its standard
            streams; the child ends with the code that it returns.
    """

    def __init__(self, become: Callable[[], int]) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it is queued, not discarded
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        guard_pid = os.getpid()
        self._exit_code: int | None = None
        self._child = os.fork()
        if self._child == 0:
            die_with_parent()  # should the guard be killed -9
            if os.getppid() != guard_pid:
                os._exit(1)
            os.setsid()
            os.closerange(FIRST_OTHER_DESCRIPTOR, os.sysconf("SC_OPEN_MAX"))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)
            # Not os._exit: the child leaves in good order, through the few frames that led here.
            raise SystemExit(become())

    def wait(self) -> int:
        """Wait until the child ends or the guard is told to stop; returns the exit code."""
        while self._exit_code is None:
            received = signal.sigwait(WATCHED_SIGNALS)
            if received in STOP_SIGNALS:
                return 128 + received
            self._reap()
        return shell_code(self._exit_code)

    def end_descendants(self, grace_s: float) -> None:
        """Ask all descendants to stop, and kill those that are left after the grace."""
        self._signal_until_gone(signal.SIGTERM, grace_s, repeat=False)
        self._signal_until_gone(signal.SIGKILL, KILL_WAIT_S, repeat=True)

    def _signal_until_gone(self, number: signal.Signals, limit_s: float, *, repeat: bool) -> None:
        deadline = time.monotonic() + limit_s
        asked: set[int] = set()
        while (alive := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in alive:
                if repeat or pid not in asked:
                    _send(pid, number)
            asked.update(alive)
            signal.sigtimedwait({signal.SIGCHLD}, POLL_S)
            self._reap()

    def _reap(self) -> None:
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = reaped
                if pid == self._child:
                    self._exit_code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return


def guarded(command: Sequence[str], grace_s: float = GRACE_S) -> list[str]:
    """A command under a guard that is a child of this process."""
    return [sys.executable, "-S", __file__, str(os.getpid()), str(grace_s), "--", *command]


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, also where that is killed -9."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def python(*arguments: str) -> list[str]:
    """The command of this Python; -P: the current folder is no place to import from."""
    return [sys.executable, "-P", *arguments]


def shell_code(code: int) -> int:
    """An exit code as shells tell it: 128 plus n where signal n ended the process."""
    return code if code >= 0 else 128 - code


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def descendants(root: int) -> list[int]:
    """Process ids of all descendants of `root`, found through the parent ids in /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent_of(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    unvisited = [root]
    while unvisited:
        direct = children.get(unvisited.pop(), [])
        found += direct
        unvisited += direct
    return found


def _parent_of(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            stat = stream.read()
    except OSError:  # it has just ended
        return None
    return int(stat[stat.rindex(")") + 2 :].split()[1])  # the name in () may hold anything


def run_guarded(become: Callable[[], int], parent: int, grace_s: float) -> int:
    """Be the guard of a child until it has ended, or until `parent` has; returns the exit code."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # the parent died before it could be watched
    guard = Guard(become)
    code = guard.wait()
    guard.end_descendants(grace_s)
    return code


def become_command(command: Sequence[str]) -> int:
    """Replace this process by a command; returns 127 where there is none such."""
    # Python ignores the first two, other programs do not; a shell ignores the third for what it
    # starts in the background, and a Prefect worker that ignores it never ends.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as exc:
        sys.stderr.write(f"{command[0]} cannot be started: {exc.strerror}\n")
        return CANNOT_BE_STARTED


def main(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name under guard."""
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[3:]
    return run_guarded(lambda: become_command(command), parent, grace_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
