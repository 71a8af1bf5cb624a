"""Strategies against each other: two pinned ranks each, interleaved, in random order.

Each engine has two rank processes of its own, on the same two cores. They train for a few steps,
one engine after the other, while the ranks of the others are stopped, so that a busy machine slows
all alike; a figure is the median of the ratios within a round.

    python -m infra.bench.training.strategies ENGINE    (in a rank's environment)

is one rank: it prints its process id, then trains some steps at each request, a line with the
names of a network and a precision on standard input, and prints the seconds that they took.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from infra.bench.figures import Figure, LeftOut, Measured, at_least, interleaved, median_ratio
from infra.bench.parts import Bench
from tasks.kernel import guard
from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.data.preprocess import Preprocessing
from tasks.training.launch.rank_group import local_environments
from tasks.training.strategies.base import Batch, Communicator
from tasks.training.strategies.communicators import join
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import HorovodStrategy, Strategy, strategy_class

STALL_S = 600
"""Ranks of a pair are stopped while others train."""
ENGINES = ("horovod", "ddp", "alone")
STEPS = {"tabular": 8, "transformer": 2}
"""Training steps in a round."""
COMPARISONS = (("horovod", "ddp", 0.95), ("horovod", "alone", 0.75), ("ddp", "alone", 0.75))
USEFUL_GAIN = 1.2
"""bf16 products that are less than this faster than fp32's cannot make a step 1.5 times so."""


class Pair:
    """The two ranks of one engine; stopped except while they train."""

    def __init__(self, engine: str, environments: Sequence[Mapping[str, str]]) -> None:
        command = guard.guarded(guard.python("-m", "infra.bench.training.strategies", engine), 2)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._guards: list[subprocess.Popen[str]] = [
            subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
            for environment in environments
        ]
        self._pids = [int(self._answer(process)) for process in self._guards]
        self._signal(signal.SIGSTOP)

    def seconds(self, network: str, precision: str) -> float:
        """Wall seconds of a round's training steps on both ranks: those of the slower one."""
        self._signal(signal.SIGCONT)
        for process in self._guards:
            cast(IO[str], process.stdin).write(f"{network} {precision}\n")
        taken = max(map(self._answer, self._guards))
        self._signal(signal.SIGSTOP)
        return taken

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> float:
        line = cast(IO[str], process.stdout).readline()
        if not line:
            raise RuntimeError(f"a rank of the bench ended with {process.wait()}")
        return float(line)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def close(self) -> None:
        """End both ranks."""
        self._signal(signal.SIGCONT)
        for process in self._guards:
            cast(IO[str], process.stdin).close()
        for process in self._guards:
            process.wait()


def figures(bench: Bench) -> Measured:
    """Horovod against DDP and both against ranks that do not talk; bf16 against fp32."""
    rounds, pairs = bench.size(40, 1), dict[str, Pair]()
    with ExitStack() as stack:
        for name in ENGINES:
            store_file = bench.folder / f"store-{name}"
            there = stack.enter_context(local_environments(2, store_file, stall_s=STALL_S))
            pairs[name] = stack.enter_context(closing(Pair(name, there)))
        engines = [f for network in STEPS for f in _engine_figures(pairs, network, rounds)]
        return [*engines, _precision_figure(pairs["alone"], rounds)]


def _engine_figures(pairs: Mapping[str, Pair], network: str, rounds: int) -> Iterator[Figure]:
    runs = {name: partial(ranks.seconds, network, "fp32") for name, ranks in pairs.items()}
    taken = interleaved(runs, rounds)
    milliseconds = {n: 1000 * statistics.median(t) / STEPS[network] for n, t in taken.items()}
    evidence = ", ".join(f"{name} {value:.0f}" for name, value in milliseconds.items())
    for name, base, bound in COMPARISONS:
        title, ratio = f"{network}: {name} to {base}", median_ratio(taken[base], taken[name])
        yield at_least(f"{title}, samples/s", ratio, bound, f"ms a step: {evidence}")


def _precision_figure(alone: Pair, rounds: int) -> Figure | LeftOut:
    """No speed where the CPU's own products are not faster in bf16: then it does not have it."""
    title, gain = "bf16 to fp32, samples/s", product_seconds("fp32") / product_seconds("bf16")
    if gain < USEFUL_GAIN:
        reason = f"this CPU's matrix products run at {gain:.2f} of their fp32 speed in bf16"
        return LeftOut(title, reason)
    runs = {p: partial(alone.seconds, "transformer", p) for p in ("fp32", "bf16")}
    taken = interleaved(runs, rounds)
    evidence = f"transformer; bare matrix products {gain:.2f}"
    return at_least(title, median_ratio(taken["fp32"], taken["bf16"]), 1.5, evidence)


# The program of a rank.

CATEGORY_COUNTS = (16, 3, 105, 3200, 7, 35, 128, 12, 7, 24)
NUM_NUMBERS = 43
NUM_BINS = 16
VOCABULARY = 1000
WIDTH = 256
TOKENS = 32


def tabular(
    rows: int, seed: int, hidden_sizes: tuple[int, ...] = (128, 64)
) -> tuple[nn.Module, Batch]:
    """The project's own network in the flights' size, and random rows of the flights' shape."""
    rng = np.random.default_rng(seed)
    edges = np.linspace(-2, 2, NUM_BINS + 1).astype(np.float32)
    preprocessing = Preprocessing(
        vocabularies=tuple(np.arange(count, dtype=np.int32) for count in CATEGORY_COUNTS),
        edges=(edges,) * NUM_NUMBERS,
        flagged=(0, 1, 2),
    )
    config = TrainingConfig(hidden_sizes=hidden_sizes, dropout=0.2, num_bins=NUM_BINS)
    positions = rng.integers(0, np.array(CATEGORY_COUNTS), (rows, len(CATEGORY_COUNTS)))
    numbers = rng.normal(size=(rows, NUM_NUMBERS)).astype(np.float32)
    inputs = (torch.from_numpy(positions), torch.from_numpy(numbers))
    # What can be learnt: three numbers and two categories.
    logits = numbers[:, :3].sum(1) + positions[:, 0] / 8 - positions[:, 4] / 4 - 1.5
    labels = torch.from_numpy((rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32))
    return TabularNetwork(preprocessing, config), Batch(inputs, labels)


class Transformer(nn.Module):
    """Two encoder layers of width 256 over 32 tokens, and one logit for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.Sequential(layer(), layer())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (sequences,), of int64 (sequences, tokens)."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens)).mean(dim=1))
        return logits.squeeze(1)


def transformer(rows: int, seed: int) -> tuple[nn.Module, Batch]:
    """A small transformer, and random sequences."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (rows, TOKENS)))
    labels = torch.from_numpy((rng.random(rows) < 0.5).astype(np.float32))
    return Transformer(), Batch((tokens,), labels)


CPU = torch.device("cpu")
SUBJECTS = {"tabular": tabular, "transformer": transformer}
ROWS = {"tabular": 1024, "transformer": 32}
"""Of one rank in a step: half of a global batch of 2048 rows, of 64 sequences."""


class Alone:
    """A communicator of one rank: the same step, without communication."""

    rank = local_rank = 0
    size = local_size = 1

    def broadcast_(self, tensors: object) -> None:
        """Nothing to do, as in the other two."""

    sum_ = broadcast_

    def shut_down(self) -> None:
        """Nothing to leave."""


def row_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy of each row."""
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def build(
    engine: str, network: nn.Module, exchange: Any, device: torch.device, **fields: object
) -> Strategy:
    """The strategy of one engine; `alone` is the default one without anybody to talk to."""
    name = "horovod" if engine == "alone" else engine
    config = StrategyConfig.model_validate({"name": name, **fields})

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-3, fused=True)

    make = HorovodStrategy if engine == "alone" else strategy_class(config)
    return make(config, exchange, network, row_losses, adamw, device)


def main(engine: str) -> None:
    """Train for a round at each request, until standard input ends."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    exchange: Communicator | Alone = Alone()
    if engine != "alone":
        exchange = join(StrategyConfig.model_validate({"name": engine}), "cpu")
    # After the meeting, as a rank of training does: the library's own thread is not pinned.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    built: dict[str, tuple[Strategy, Batch]] = {}
    print(os.getpid(), flush=True)
    for request in sys.stdin:
        name, precision = request.split()
        if request not in built:
            torch.manual_seed(0)
            network, batch = SUBJECTS[name](ROWS[name], rank)
            strategy = build(engine, network, exchange, CPU, precision=precision)
            built[request] = (strategy, batch)
        print(timed(*built[request], exchange.size, STEPS[name]), flush=True)
    exchange.shut_down()


def timed(strategy: Strategy, batch: Batch, size: int, steps: int) -> float:
    """Wall seconds of some training steps."""
    started = time.perf_counter()
    for _ in range(steps):
        strategy.train_step(batch, size * batch.num_rows, 1e-3).item()
    return time.perf_counter() - started


def product_seconds(precision: str) -> float:
    """CPU seconds of one matrix product of a layer's size, the best of many, on one thread."""
    torch.set_num_threads(1)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    rows, weights = torch.ones(1024, 512, dtype=kind), torch.ones(512, 512, dtype=kind)
    taken = []
    for _ in range(40):
        started = time.process_time()
        functional.linear(rows, weights)
        taken.append(time.process_time() - started)
    return min(taken)


if __name__ == "__main__":
    main(sys.argv[1])
