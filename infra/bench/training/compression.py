"""Fewer bytes between ranks, and what that does to the model.

Two ranks train the use case's network on the finished loop's snapshot, in each way and from several
seeds. They run in a network namespace of their own, whose loopback interface counts every byte that
they send: gradients, negotiation and packet headers. The state folder is only read.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from infra.bench.figures import Figure, LeftOut, Measured, at_most
from infra.bench.parts import Bench, newest_record
from infra.bench.training.compression_rank import WAYS, Outcome
from infra.bench.training.rank_processes import NUM_RANKS, run_ranks
from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.core.run_directory import RunDirectory, TrainingJob

RANK_MODULE = "infra.bench.training.compression_rank"
NUM_EPOCHS = 2
HIDDEN_SIZES = (256, 128)
# Of fp32's bytes at the interface. Averaging every eighth step sends an eighth of the values, and
# the first weights.
BYTES_BOUNDS = {
    "fp16": 1 / 2,
    "PowerSGD": 1 / 20,
    "8 local steps": 1.1 / 8,
    "8 steps, late mean": 1.1 / 8,
}
MAX_AUC_LOST = 1.0
"""In spreads of fp32's seeds."""
# To set an interface's flags, from linux/sockios.h and linux/if.h.
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def figures(bench: Bench) -> Measured:
    """Measure on the snapshot of the newest finished loop.

    Raises:
        RuntimeError: a rank failed.
    """
    refused = subprocess.run(_unshared("true"), capture_output=True, text=True, check=False)
    if refused.returncode:
        why = f"no network namespace can be made here: {refused.stderr.strip()}"
        return [
            LeftOut(name.format(way), why)
            for way in BYTES_BOUNDS
            for name in ("bytes with {}, to fp32", "AUC lost to {}, seed spreads")
        ]
    config, snapshot = bench.config, newest_record(bench.settings).dataset.snapshot
    epochs, sizes = bench.size((NUM_EPOCHS, HIDDEN_SIZES), (1, (16,)))
    changes = {"max_epochs": epochs, "hidden_sizes": sizes}
    job = TrainingJob(
        snapshot_path=bench.settings.store.path(snapshot.data),
        columns=snapshot.columns,
        splits=config.splits,
        config=config.training.model_copy(update=changes),
    )
    return _figures(_outcomes(bench.folder / "run", job))


def _unshared(*command: str) -> list[str]:
    """A command in a network namespace of its own, as root of a user namespace where need be."""
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", *command]


def _outcomes(run_path: Path, job: TrainingJob) -> list[Outcome]:
    RunDirectory(run_path).prepare(job)
    command = [sys.executable, "-m", "infra.bench.training.compression", str(run_path)]
    done = subprocess.run(_unshared(*command), cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}; what they said is above")
    lines = json.loads((run_path / "outcomes.json").read_text())
    return [Outcome(**line) for line in lines]


def _run_inside(run_path: Path) -> None:
    """In the new namespace: bring its loopback interface up, and run the ranks to their end."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    run_ranks(RANK_MODULE, run_path)


def _figures(outcomes: Sequence[Outcome]) -> Measured:
    by_way = {way: [o for o in outcomes if o.way == way] for way in WAYS}
    plain = by_way.pop("fp32")
    return [
        figure
        for way, of_way in by_way.items()
        for figure in (_bytes_figure(way, of_way, plain), _auc_figure(way, of_way, plain))
    ]


def _bytes_figure(way: str, of_way: list[Outcome], plain: list[Outcome]) -> Figure:
    measured = median(o.loopback_bytes for o in of_way)
    ratio = measured / median(o.loopback_bytes for o in plain)
    counted = of_way[0].counted_bytes / plain[0].counted_bytes
    per_step_kib = measured / NUM_RANKS / of_way[0].steps / 1024
    evidence = f"{per_step_kib:,.1f} KiB a rank and step; gradients alone {counted:.4f}"
    return at_most(f"bytes with {way}, to fp32", ratio, BYTES_BOUNDS[way], evidence)


def _auc_figure(way: str, of_way: list[Outcome], plain: list[Outcome]) -> Figure:
    """What the mean over the seeds loses, against how far fp32's seeds lie apart."""
    lowest, highest = (pick(o.auc for o in plain) for pick in (min, max))
    mean, plain_mean = (fmean(o.auc for o in of) for of in (of_way, plain))
    lost = (plain_mean - mean) / (highest - lowest)
    evidence = (
        f"mean {mean:.4f}, fp32's {plain_mean:.4f} of {lowest:.4f} to {highest:.4f}, "
        f"{len(plain)} seeds"
    )
    return at_most(f"AUC lost to {way}, seed spreads", lost, MAX_AUC_LOST, evidence)


if __name__ == "__main__":
    _run_inside(Path(sys.argv[1]))
