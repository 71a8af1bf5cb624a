"""What encryption costs the loop, what of it is readable on the disk, and a key rotated under load.

Loops on new state folders, encrypted and not, in turns; the CPU of the program that mounts the
folder counts. Then words that are surely in the state are sought in all bytes on the disk: they
are in the plain folder, or the search would show nothing.
"""

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import psutil

from infra.bench.figures import LeftOut, Measured, at_least, at_most, interleaved, median_ratio
from infra.bench.loop import run_measured
from infra.bench.parts import Bench
from infra.bench.processes import run_python
from infra.bench.running import loop_environment
from infra.bench.serving.installation import environment_of
from infra.bench.serving.replicas import await_more, replicas
from tasks.state.encrypted_folder import PROGRAM, lock_state, open_state

WORDS = (b"flight-delay", b"arr_delay", b"sched_dep", b"N14228", b"CREATE TABLE")
"""Names of the model, of columns and tables, and a value of the raw data."""
ENCRYPTED, PLAIN = "encrypted", "plain"
PER_S, ROTATIONS = 300.0, 5
OK = b"http/1.1 200"


def figures(bench: Bench) -> Measured:
    """CPU of encrypted loops to that of others, words found, answers lost while a key rotates."""
    if shutil.which(PROGRAM) is None:
        return [LeftOut("all figures of encryption", f"{PROGRAM} is not installed")]
    log, found, own = bench.folder / "log.txt", dict[str, int](), loop_environment(bench)

    def run(what: str) -> float:
        folder = bench.folder / f"{what}-{len(os.listdir(bench.folder))}"
        home, keys = folder / "home", (bench.folder / "keys").as_uri()
        home.mkdir(parents=True)
        falaj = ["-m", "falaj", "--home", str(home)]
        if what == ENCRYPTED:
            run_python([*falaj, "encryption", "enable", "--keys", keys], log, own)
            open_state(home, dict(own))  # what is mounted under a guard goes with it
        cpu = run_measured([*falaj, "run"], log, own).cpu_s + _of_mount(home)
        lock_state(home)
        found[what] = _words_in(folder)
        return round(cpu, 1)

    turns = {what: partial(run, what) for what in (PLAIN, ENCRYPTED)}
    cpu = interleaved(turns, bench.size(2, 1))
    ratio = median_ratio(cpu[ENCRYPTED], cpu[PLAIN])
    lost, answers = _lost_while_rotating(bench)
    load = f"{ROTATIONS} rotations, {answers} answers at {PER_S:.0f} requests/s"
    return [
        at_most("encrypted loop, its CPU", ratio, 1.15, f"CPU seconds: {cpu}"),
        at_most("words found on the encrypted disk", found[ENCRYPTED], 0, f"of {len(WORDS)}"),
        at_least("words found on the plain disk", found[PLAIN], 3, "so the search finds them"),
        at_most("answers lost in rotations of the key", lost, 0, load),
    ]


def _of_mount(home: Path) -> float:
    """CPU seconds of the program that serves a mount, since it began."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == PROGRAM and str(home) in (process.info["cmdline"] or []):
            return sum(process.cpu_times()[:2])
    return 0.0


def _words_in(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file()]
    contents = [str(path.relative_to(folder)).encode() + path.read_bytes() for path in files]
    return sum(any(word in content for content in contents) for word in WORDS)


def _lost_while_rotating(bench: Bench) -> tuple[int, int]:
    """Answers other than 200, and all answers, while a server's state folder gets new keys."""
    home = bench.folder / "serving" / "home"
    environment, log = {**os.environ, **environment_of(home)}, bench.folder / "log.txt"
    enable = ["-m", "falaj", "encryption", "enable", "--keys", (bench.folder / "keys").as_uri()]
    run_python(enable, log, environment)
    open_state(home, dict(environment))
    with replicas(home, 1) as made, made.load(PER_S) as answers:
        for _ in range(ROTATIONS):
            await_more(answers)
            run_python(["-m", "falaj", "encryption", "rotate"], log, environment)
        await_more(answers)
    # This process has files of it open.
    subprocess.run(["fusermount", "-uz", str(home)], check=True)
    return sum(not head.startswith(OK) for _, head in answers), len(answers)
