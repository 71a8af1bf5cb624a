import os
import signal
import subprocess
import sys
import uuid

import pytest

from tasks.kernel import guard
from tests.support.host.processes import pids_whose_command_holds, wait_until


@pytest.fixture
def mark() -> str:
    """A text for command lines, by which a test finds its own processes."""
    return f"mark-{uuid.uuid4().hex}"


def await_end(mark: str) -> None:
    wait_until(lambda: not pids_whose_command_holds(mark), "nothing is left", limit_s=10)


def tree(mark: str) -> str:
    """Shell: a sleeping child, a grandchild in a session of its own, and a last sleep."""
    sleep = f"exec -a {mark} sleep 300"
    return f"({sleep}) & setsid bash -c '{sleep}' & {sleep}"


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_guard_exits_like_its_command(command: str, code: int) -> None:
    assert subprocess.run(guard.guarded(["bash", "-c", command]), check=False).returncode == code


def test_sigterm_ends_the_whole_tree(mark: str) -> None:
    process = subprocess.Popen(guard.guarded(["bash", "-c", tree(mark)]))
    wait_until(lambda: len(pids_whose_command_holds(mark)) >= 3, "the tree is up")
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not pids_whose_command_holds(mark)


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(mark: str) -> None:
    script = f"trap '' TERM; echo ready; bash -c \"trap '' TERM; exec -a {mark} sleep 300\""
    process = subprocess.Popen(guard.guarded(["bash", "-c", script], 0.3), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    process.wait(10)
    process.stdout.close()
    assert not pids_whose_command_holds(mark)


def test_kill_9_of_the_parent_ends_the_whole_tree(mark: str) -> None:
    program = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-S', sys.argv[1], str(os.getpid()), '5', '--',\n"
        "                'bash', '-c', sys.argv[2]])"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, guard.__file__, tree(mark)])
    wait_until(lambda: len(pids_whose_command_holds(f"{mark}\0")) >= 3, "the tree is up")
    parent.kill()
    parent.wait()
    await_end(mark)


def test_kill_9_of_the_guard_itself_ends_the_command(mark: str) -> None:
    process = subprocess.Popen(guard.guarded(["bash", "-c", f"exec -a {mark} sleep 300"]))
    wait_until(lambda: len(pids_whose_command_holds(f"{mark}\x00300")) == 1, "the command is up")
    process.kill()
    process.wait()
    await_end(mark)


def test_a_guard_whose_parent_is_already_gone_starts_nothing(mark: str) -> None:
    command = guard.guarded(["bash", "-c", f"exec -a {mark} sleep 300"])
    command[3] = str(os.getppid())  # another process than the one that starts it
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGTERM
    assert not pids_whose_command_holds(mark)


def test_a_command_inherits_no_descriptor_of_the_guard_and_ends_by_a_broken_pipe() -> None:
    read, write = os.pipe()
    script = f"[ -e /proc/self/fd/{write} ] && echo inherited; (yes; echo $? >&2) | head -1"
    run = subprocess.run(
        guard.guarded(["bash", "-c", script]),
        check=False,
        capture_output=True,
        text=True,
        pass_fds=(write,),
    )
    os.close(read)
    os.close(write)
    assert (run.stdout, run.stderr) == ("y\n", f"{128 + signal.SIGPIPE}\n")
