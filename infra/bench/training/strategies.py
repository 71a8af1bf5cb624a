"""Strategies against each other: two pinned ranks each, in turn, in random order.

Each engine has two rank processes of its own, on the same two cores. They train in turn for a few
steps, while the ranks of the others are stopped, so that a busy machine slows all alike; a
figure is the median of the ratios within a round.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from infra.bench.figures import LeftOut, Measured, at_least, at_most
from infra.bench.parts import Bench
from tasks.kernel import guard
from tasks.training.launch.rank_group import local_environments

NUM_RANKS = 2
STALL_S = 600
"""Ranks of a pair are stopped while others train."""
ENGINES = ("horovod", "ddp", "alone")
STEPS = {"tabular": 8, "transformer": 2}
"""Training steps in a round."""
COMPARISONS = (("horovod", "ddp", 0.95), ("horovod", "alone", 0.75), ("ddp", "alone", 0.75))
ROUNDS, SEEDS = 40, 4
USEFUL_GAIN = 1.2
"""bf16 products that are less than this faster than fp32's cannot make a step 1.5 times so."""


class Pair:
    """The two ranks of one engine; stopped except when they are asked for something."""

    def __init__(self, engine: str, environments: Sequence[Mapping[str, str]]) -> None:
        command = guard.python("-m", "infra.bench.training.strategy_rank", engine)
        self._guards = [
            subprocess.Popen(
                guard.guarded(command, 2),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for environment in environments
        ]
        self._pids = [int(self._answer(process)["pid"]) for process in self._guards]
        self._signal(signal.SIGSTOP)

    def seconds(self, network: str, precision: str, steps: int) -> float:
        """Wall seconds of some training steps on both ranks: those of the slower one."""
        request = {"task": "steps", "network": network, "precision": precision, "steps": steps}
        return max(float(answer["seconds"]) for answer in self._ask(request, self._guards))

    def one_rank(self, **request: object) -> dict[str, Any]:
        """What the first rank answers, while the second is idle."""
        return self._ask(request, self._guards[:1])[0]

    def _ask(
        self, request: Mapping[str, object], ranks: Sequence[subprocess.Popen[bytes]]
    ) -> list[dict[str, Any]]:
        self._signal(signal.SIGCONT)
        for process in ranks:
            stream = cast(IO[bytes], process.stdin)
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
        answers = [self._answer(process) for process in ranks]
        self._signal(signal.SIGSTOP)
        return answers

    @staticmethod
    def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
        line = cast(IO[bytes], process.stdout).readline()
        if not line:
            raise RuntimeError(f"a rank of the bench ended with {process.wait()}")
        return cast(dict[str, Any], json.loads(line))

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def close(self) -> None:
        """End both ranks."""
        self._signal(signal.SIGCONT)
        for process in self._guards:
            cast(IO[bytes], process.stdin).close()
        for process in self._guards:
            process.wait()


@contextmanager
def pair(engine: str, folder: Path) -> Iterator[Pair]:
    """Two ranks of `engine`, ready to train."""
    store_file = folder / f"store-{uuid.uuid4().hex}"
    with local_environments(NUM_RANKS, store_file, stall_s=STALL_S) as environments:
        ranks = Pair(engine, environments)
        try:
            yield ranks
        finally:
            ranks.close()


def figures(bench: Bench) -> Measured:
    """Horovod against DDP and both against ranks that do not talk; bf16 against fp32."""
    with ExitStack() as open_pairs:
        pairs = {name: open_pairs.enter_context(pair(name, bench.folder)) for name in ENGINES}
        measured: Measured = []
        for network in STEPS:
            measured += _engine_figures(pairs, network, bench.size(ROUNDS, 1))
        return measured + _precision_figures(pairs["alone"], bench)


def _engine_figures(pairs: Mapping[str, Pair], network: str, rounds: int) -> Measured:
    runs = {
        name: partial(ranks.seconds, network, "fp32", STEPS[network])
        for name, ranks in pairs.items()
    }
    taken = interleaved(runs, rounds)
    milliseconds = {n: 1000 * statistics.median(t) / STEPS[network] for n, t in taken.items()}
    evidence = ", ".join(f"{name} {value:.0f}" for name, value in milliseconds.items())
    return [
        at_least(f"{network}: {name} to {base}, samples/s", ratio, bound, f"ms a step: {evidence}")
        for name, base, bound in COMPARISONS
        for ratio in [median_ratio(taken[base], taken[name])]
    ]


def _precision_figures(alone: Pair, bench: Bench) -> Measured:
    """No speed where the CPU's own products are not faster in bf16: then it does not have it."""
    products = {
        precision: float(alone.one_rank(task="products", precision=precision)["seconds"])
        for precision in ("fp32", "bf16")
    }
    gain = products["fp32"] / products["bf16"]
    aucs = {
        precision: [
            float(alone.one_rank(task="auc", precision=precision, seed=seed)["auc"])
            for seed in range(bench.size(SEEDS, 2))
        ]
        for precision in ("fp32", "bf16")
    }
    gap = abs(statistics.median(aucs["fp32"]) - statistics.median(aucs["bf16"]))
    spread = max(aucs["fp32"]) - min(aucs["fp32"])
    quality = at_most("bf16: AUC gap to seed spread", gap / spread, 1, f"{gap:.4f} of {spread:.4f}")
    if gain < USEFUL_GAIN:
        reason = f"this CPU's matrix products run at {gain:.2f} of their fp32 speed in bf16"
        return [quality, LeftOut("bf16 to fp32, samples/s", reason)]
    runs = {p: partial(alone.seconds, "transformer", p, 2) for p in ("fp32", "bf16")}
    taken = interleaved(runs, bench.size(ROUNDS, 1))
    speed = median_ratio(taken["fp32"], taken["bf16"])
    evidence = f"transformer; bare matrix products {gain:.2f}"
    return [quality, at_least("bf16 to fp32, samples/s", speed, 1.5, evidence)]


def interleaved(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round, in an order drawn anew for every round."""
    order, rng = list(runs), random.Random(0)
    for run in runs.values():
        run()  # the first time builds
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            taken[name].append(runs[name]())
    return taken


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
