"""Processes of a run are found by their environment, and only they are ended."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.control.recovery import task as recovery
from tasks.control.recovery.task import RUN_VARIABLE, end_processes
from tasks.kernel.files import machine_id
from tasks.kernel.process import processes_by_variable

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
GENTLE = "print(1, flush=True)"


@contextmanager
def process_of(run: str, program: str) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-c", f"{program}; import time; time.sleep(600)"]
    environment = {**os.environ, RUN_VARIABLE: run}
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_processes_are_found_and_ended_even_those_that_do_not_want_to() -> None:
    run, other = str(uuid4()), str(uuid4())
    with (
        process_of(run, GENTLE) as gentle,
        process_of(run, STUBBORN) as stubborn,
        process_of(other, GENTLE) as spared,
    ):
        found = processes_by_variable(RUN_VARIABLE)
        assert sorted(found[run]) == sorted([gentle.pid, stubborn.pid])
        # A process id that belongs to something else by now is not touched.
        assert end_processes(run, [*found[run], spared.pid, os.getpid()], grace_s=0.3) == ()
        assert gentle.wait(30) == -15
        assert stubborn.wait(30) == -9
        assert spared.poll() is None
        assert run not in processes_by_variable(RUN_VARIABLE)


def test_a_boot_is_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    own = recovery.own_labels()
    rebooted, another = own | {recovery.BOOT: "another"}, {recovery.MACHINE: "another"}
    assert all(map(recovery.process_of, (own, own | another, rebooted)))
    assert recovery.process_of(rebooted | another) is None
    del rebooted[recovery.MACHINE]  # as of an earlier release
    assert recovery.process_of(rebooted)


def test_a_copied_folder_and_another_network_card_are_of_another_machine(tmp_path: Path) -> None:
    home, card, seen = tmp_path / "home", tmp_path / "net/eth0", set()
    (card / "device").mkdir(parents=True)
    for address in ("52:54:00:00:00:02", "52:54:00:00:00:01", "52:54:00:00:00:01"):
        (card / "address").write_text(address)
        seen.add(machine_id(home, card.parent))
    shutil.copytree(home, tmp_path / "copy")
    assert len(seen | {machine_id(tmp_path / "copy", card.parent)}) == 3
