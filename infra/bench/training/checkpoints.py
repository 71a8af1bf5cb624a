"""What checkpoints cost.

Training of a multilayer perceptron on all cores goes on in short stretches: without checkpoints,
with one that is written beside it, and with one that is waited for, interleaved. And the writing
alone against a plain write and flush of as many bytes.
"""

import itertools
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from infra.bench.figures import (
    Figure,
    Measured,
    at_least,
    at_most,
    interleaved,
    median_ratio,
    seconds,
)
from infra.bench.parts import Bench
from tasks.training.checkpoints.disk import Disk
from tasks.training.checkpoints.store import CheckpointStore
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.strategies.base import State

WIDTH = 1024
"""2.4 million parameters: with AdamW's state and the best weights, 38 MB a checkpoint."""
BATCH_ROWS = 512


class Training:
    """A network that trains, and its state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._network = nn.Sequential(
            nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1),
        )  # fmt: skip
        self._optimizer = torch.optim.AdamW(self._network.parameters(), fused=True)
        self._inputs = torch.randn(BATCH_ROWS, 256)
        self._labels = torch.randint(2, (BATCH_ROWS, 1)).float()

    def steps(self, count: int) -> None:
        """Train on the same rows so many times."""
        for _ in range(count):
            self._optimizer.zero_grad()
            logits = self._network(self._inputs)
            functional.binary_cross_entropy_with_logits(logits, self._labels).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def state(self) -> State:
        """What a checkpoint holds."""
        network = self._network.state_dict()
        best = {name: value.clone() for name, value in network.items()}
        return {"network": network, "optimizer": self._optimizer.state_dict(), "best": best}


def figures(bench: Bench) -> Measured:
    """Training beside a checkpoint, and the writing of one."""
    return [*_training_figures(bench), _write_figure(bench)]


def _training_figures(bench: Bench) -> Measured:
    training, folder = Training(), bench.folder
    step_s = min(seconds(lambda: training.steps(1)) for _ in range(20))
    steps = max(1, round(bench.size(2.0, 0.1) / step_s))
    numbers = itertools.count(1)

    def stretch(writer: CheckpointWriter | None) -> tuple[float, float]:
        """Save, then train for a while: seconds of all, and those in which training stood still."""
        started = time.perf_counter()
        if writer:
            writer.save(next(numbers), 0, training.state())
        still_s = time.perf_counter() - started
        training.steps(steps)
        return time.perf_counter() - started, still_s

    with (
        CheckpointWriter(_store(folder / "a"), 60, asynchronous=True) as beside,
        CheckpointWriter(_store(folder / "b"), 60) as waiting,
    ):
        writers = {"none": None, "beside": beside, "waited for": waiting}
        ways = {name: partial(stretch, writer) for name, writer in writers.items()}
        taken = interleaved(ways, bench.size(9, 1))
    # The best of each: what other programs take on a shared machine only ever adds.
    best = {name: min(total for total, _ in stretches) for name, stretches in taken.items()}
    still = {name: min(still for _, still in stretches) for name, stretches in taken.items()}
    shares = {name: best[name] / best["none"] - 1 for name in ("beside", "waited for")}
    waited = f"every {best['none']:.1f} s; waited for {shares['waited for']:.3f}"
    stood = f"{still['beside'] * 1e3:.0f} ms to {still['waited for'] * 1e3:.0f} ms"
    ratio = still["beside"] / still["waited for"]
    return [
        at_most("a checkpoint beside training, share of time", shares["beside"], 0.1, waited),
        at_most("training stands still, beside to waited for", ratio, 0.5, stood),
    ]


def _write_figure(bench: Bench) -> Figure:
    """A checkpoint against the same bytes, written plainly."""
    folder, num_bytes = bench.folder, bench.size(128 << 20, 8 << 20)
    weights = torch.randn(num_bytes // 4)
    store, numbers = _store(folder / "c"), itertools.count()

    def save_s() -> float:
        store.prune(1)
        return seconds(lambda: store.save(next(numbers), 0, {"w": weights}))

    def plain_s() -> float:
        return seconds(lambda: _write_plainly(folder / "plain", weights))

    taken = interleaved({"ours": save_s, "plain": plain_s}, bench.size(7, 2))
    rate = num_bytes / statistics.median(taken["ours"]) / 1e6
    evidence = f"{rate:,.0f} MB/s with SHA-256, {num_bytes >> 20} MiB"
    ratio = median_ratio(taken["plain"], taken["ours"])
    return at_least("checkpoint bytes/s to a plain write and flush", ratio, 0.5, evidence)


def _write_plainly(path: Path, weights: Tensor) -> None:
    aside = path.with_suffix(".aside")
    with aside.open("wb", buffering=0) as stream:
        stream.write(weights.numpy().data)
        os.fsync(stream.fileno())
    aside.replace(path)


def _store(folder: Path) -> CheckpointStore:
    return CheckpointStore(Disk(folder))
