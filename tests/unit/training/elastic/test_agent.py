import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.training.elastic import agent
from tests.support.host.processes import pids_whose_command_holds, wait_until

SLEEPER = "import sys, time; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(600)"
ECHO = "import sys; [(sys.stdout.write(line), sys.stdout.flush()) for line in sys.stdin]"


@contextmanager
def started(
    folder: Path, program: str, silence_limit_s: float = 60, arguments: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """The agent with a rank that is a small program; `folder` marks its processes."""
    order = {
        "command": [sys.executable, "-c", program, str(folder), *arguments],
        "directory": str(folder),
        "environment": {"RANK_VALUE": "given"},
        "inherit": ["PATH"],
        "silence_limit_s": silence_limit_s,
        "grace_s": 1,
    }
    with subprocess.Popen(
        [sys.executable, "-S", agent.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def await_no_rank(folder: Path) -> None:
    wait_until(lambda: not pids_whose_command_holds(str(folder)), "the rank is gone")


def test_what_follows_the_order_reaches_the_rank_and_its_end_ends_it(tmp_path: Path) -> None:
    with started(tmp_path, ECHO) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello\n"
        process.stdin.close()
        assert process.wait(30) == agent.EXIT_CUT_OFF


def test_the_rank_has_the_given_environment_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_PASSWORD", "secret")
    program = "import os; print(sorted(os.environ), os.getcwd())"
    with started(tmp_path, program) as process:
        printed = process.stdout.readline().decode()
    assert "'RANK_VALUE'" in printed
    assert "FALAJ_PASSWORD" not in printed
    assert str(tmp_path) in printed


def test_silence_ends_the_rank(tmp_path: Path) -> None:
    with started(tmp_path, SLEEPER, silence_limit_s=0.5) as process:
        assert process.wait(30) == agent.EXIT_CUT_OFF
    await_no_rank(tmp_path)


def test_kill_9_of_the_agent_ends_the_rank(tmp_path: Path) -> None:
    with started(tmp_path, SLEEPER) as process:
        assert process.stdout.readline() == b"up\n"
        os.kill(process.pid, signal.SIGKILL)
    await_no_rank(tmp_path)


def test_a_host_without_the_shared_folder_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path / "absent", SLEEPER) as process:
        assert process.wait(30) == agent.EXIT_NO_DIRECTORY
    assert "must be shared, under the same path on all hosts" in capfd.readouterr().err
