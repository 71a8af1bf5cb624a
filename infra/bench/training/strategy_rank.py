"""One rank of the strategies' bench: builds its networks, then trains some steps at each request.

    python -m infra.bench.training.strategy_rank ENGINE    (in a rank's environment)

Requests come as lines of JSON on standard input, answers as lines of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.core.objective import histogram_auc, score_histograms
from tasks.training.data.preprocess import Preprocessing
from tasks.training.strategies.base import Batch, Communicator
from tasks.training.strategies.build import build_strategy, join
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import HorovodStrategy, Strategy
from tasks.training.strategies.optimizer import SIXTEEN_BITS

CATEGORY_COUNTS = (16, 3, 105, 3200, 7, 35, 128, 12, 7, 24)
NUM_NUMBERS = 43
NUM_BINS = 16
VOCABULARY = 1000
WIDTH = 256
TOKENS = 32


@dataclass(frozen=True)
class Subject:
    """A network to be trained, and one rank's batch for it."""

    network: nn.Module
    batch: Batch


def tabular(rows: int, seed: int) -> Subject:
    """The project's own network in the flights' size, and random rows of the flights' shape."""
    rng = np.random.default_rng(seed)
    edges = np.linspace(-2, 2, NUM_BINS + 1).astype(np.float32)
    preprocessing = Preprocessing(
        vocabularies=tuple(np.arange(count, dtype=np.int32) for count in CATEGORY_COUNTS),
        edges=(edges,) * NUM_NUMBERS,
        flagged=(0, 1, 2),
    )
    config = TrainingConfig(hidden_sizes=(128, 64), dropout=0.2, num_bins=NUM_BINS)
    positions = rng.integers(0, np.array(CATEGORY_COUNTS), (rows, len(CATEGORY_COUNTS)))
    numbers = rng.normal(size=(rows, NUM_NUMBERS)).astype(np.float32)
    inputs = (torch.from_numpy(positions), torch.from_numpy(numbers))
    # What can be learnt: three numbers and two categories.
    logits = numbers[:, :3].sum(1) + positions[:, 0] / 8 - positions[:, 4] / 4 - 1.5
    labels = torch.from_numpy((rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32))
    return Subject(TabularNetwork(preprocessing, config), Batch(inputs, labels))


class Transformer(nn.Module):
    """Two encoder layers of width 256 over 32 tokens, and one logit for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (sequences,), of int64 (sequences, tokens)."""
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.mean(dim=1)).squeeze(1)
        return logits


def transformer(rows: int, seed: int) -> Subject:
    """A small transformer, and random sequences."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (rows, TOKENS)))
    labels = torch.from_numpy((rng.random(rows) < 0.5).astype(np.float32))
    return Subject(Transformer(), Batch((tokens,), labels))


SUBJECTS = {"tabular": tabular, "transformer": transformer}
ROWS = {"tabular": 1024, "transformer": 32}
"""Of one rank in a step: half of a global batch of 2048 rows, of 64 sequences."""
PRODUCTS = 40
QUALITY_STEPS = 120
QUALITY_ROWS = 20_000


class Alone:
    """An exchange of a rank with nobody: the same step, without communication."""

    name = "alone"
    rank = local_rank = 0
    size = local_size = 1

    def broadcast_(self, tensors: object) -> None:
        """Nobody to hear it."""

    def sum_(self, tensor: Tensor) -> None:
        """The sum over one rank."""

    def shut_down(self) -> None:
        """Nobody to leave."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The project's optimizer."""
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-3, fused=True)


def row_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy of each row."""
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def build(engine: str, subject: Subject, exchange: Any, precision: str) -> Strategy:
    """The strategy of one engine; `alone` is the default one without anybody to talk to."""
    config = StrategyConfig.model_validate(
        {"name": "horovod" if engine == "alone" else engine, "precision": precision}
    )
    arguments = (subject.network, row_losses, adamw, torch.device("cpu"))
    if engine == "alone":
        return HorovodStrategy(config, exchange, *arguments)
    return build_strategy(config, exchange, *arguments)


def main(engine: str) -> None:
    """Answer requests until standard input ends."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    exchange: Communicator | Alone = (
        Alone()
        if engine == "alone"
        else join(StrategyConfig.model_validate({"name": engine}), "cpu")
    )
    # After the meeting, as a rank of training does: the library's own thread is not pinned.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    built: dict[tuple[str, str], tuple[Strategy, Batch]] = {}
    say({"pid": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        if request["task"] == "auc":
            say({"auc": trained_auc(exchange, request["precision"], request["seed"])})
            continue
        if request["task"] == "products":
            say({"seconds": product_seconds(request["precision"])})
            continue
        name, precision = request["network"], request["precision"]
        if (name, precision) not in built:
            torch.manual_seed(0)
            subject = SUBJECTS[name](ROWS[name], rank)
            built[name, precision] = (build(engine, subject, exchange, precision), subject.batch)
        say({"seconds": timed(*built[name, precision], exchange.size, request["steps"])})
    exchange.shut_down()


def timed(strategy: Strategy, batch: Batch, size: int, steps: int) -> float:
    """Wall seconds of some training steps."""
    started = time.perf_counter()
    for _ in range(steps):
        strategy.train_step(batch, size * batch.num_rows, 1e-3).item()
    return time.perf_counter() - started


def trained_auc(exchange: Any, precision: str, seed: int) -> float:
    """AUC on unseen rows after a short training of the tabular network alone."""
    torch.manual_seed(seed)
    rows = ROWS["tabular"]
    subject = tabular(QUALITY_STEPS * rows, 0)
    strategy = build("alone", subject, exchange, precision)
    for step in range(QUALITY_STEPS):
        part = slice(step * rows, (step + 1) * rows)
        inputs = tuple(tensor[part] for tensor in subject.batch.inputs)
        strategy.train_step(Batch(inputs, subject.batch.labels[part]), rows, 2e-3)
    unseen = tabular(QUALITY_ROWS, 1).batch
    scores = torch.sigmoid(strategy.evaluate(unseen.inputs)).numpy()
    return histogram_auc(score_histograms(scores, unseen.labels.numpy()))


def product_seconds(precision: str) -> float:
    """CPU seconds of one matrix product of a layer's size, the best of many."""
    kind = SIXTEEN_BITS.get(precision, torch.float32)
    rows, weights = torch.ones(1024, 512, dtype=kind), torch.ones(512, 512, dtype=kind)
    taken = []
    for _ in range(PRODUCTS):
        started = time.process_time()
        functional.linear(rows, weights)
        taken.append(time.process_time() - started)
    return min(taken)


def say(answer: dict[str, Any]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
