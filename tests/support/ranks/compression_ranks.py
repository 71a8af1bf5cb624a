"""One rank of the tests of compressed, local and late exchanges: `python -m ... FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import Batch, Communicator, State
from tasks.training.strategies.build import build_strategy, join
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import Strategy
from tests.support.ranks.strategy_cases import adamw

CPU = torch.device("cpu")
NUM_STEPS = 40
HALF = NUM_STEPS // 2
ROWS = 16
WIDTH = 24
WAYS: dict[str, dict[str, object]] = {
    "none": {},
    "fp16": {"gradient_compression": "fp16"},
    "powersgd": {"gradient_compression": "powersgd"},
    "local": {"local_steps": 4},
    "asynchronous": {"local_steps": 4, "asynchronous": True},
}
ENGINES = ("horovod", "ddp")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.squeeze(1) - labels).square()


def batch_of(step: int, rank: int) -> Batch:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(ROWS, WIDTH, generator=draw)
    return Batch((inputs,), inputs[:, :3].sum(1).tanh())


def build(way: str, engine: str, exchange: Communicator) -> Strategy:
    config = StrategyConfig.model_validate({"name": engine, **WAYS[way]})
    return build_strategy(config, exchange, network(), squares, adamw, CPU)


def train(strategy: Strategy, exchange: Communicator, steps: range) -> None:
    for step in steps:
        strategy.train_step(batch_of(step, exchange.rank), ROWS * exchange.size, 0.01)


def loss_of(strategy: Strategy) -> float:
    """On rows that no rank trained on."""
    batch = batch_of(10_000, 0)
    return float(squares(strategy.evaluate(batch.inputs), batch.labels).mean())


def run(way: str, engine: str, exchange: Communicator, folder: Path) -> dict[str, Any]:
    """Train, with a state taken in the middle from which another strategy goes on."""
    strategy = build(way, engine, exchange)
    before = loss_of(strategy)
    train(strategy, exchange, range(HALF))
    sent = strategy.wire_bytes
    state = strategy.state()
    train(strategy, exchange, range(HALF, NUM_STEPS))
    if exchange.rank == 0:
        torch.save(state, folder / f"{way}, {engine}.pt")
    other = build(way, engine, exchange)
    other.load(state)
    train(other, exchange, range(HALF, NUM_STEPS))
    return {
        "before": before,
        "after": loss_of(strategy),
        "resumed": loss_of(other),
        "checksum": strategy.checksum(),
        "sent": sent,
    }


def break_one(way: str, engine: str, exchange: Communicator) -> dict[str, Any]:
    """One label of the last rank is infinite: no weight may change on any rank."""
    strategy = build(way, engine, exchange)
    batch = batch_of(0, exchange.rank)
    if exchange.rank == exchange.size - 1:
        batch.labels[2] = float("inf")
    before = strategy.checksum()
    try:
        strategy.train_step(batch, ROWS * exchange.size, 0.01)
        said = "nothing"
    except TrainingError as exc:
        said = str(exc)
    return {"said": said, "kept": strategy.checksum() == before}


def resume_elsewhere(folder: Path, exchange: Communicator) -> dict[str, float]:
    """Go on from the states of all ways and engines that another number of ranks has left."""
    seen = {}
    for path in sorted(folder.glob("*.pt")):
        way, _, engine = path.stem.partition(", ")
        if engine == "horovod":
            strategy = build(way, engine, exchange)
            state: State = torch.load(path, weights_only=True)
            strategy.load(state)
            train(strategy, exchange, range(HALF, NUM_STEPS))
            seen[way] = loss_of(strategy)
    return seen


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    exchanges = {
        "horovod": join(StrategyConfig(), "cpu"),
        "ddp": join(StrategyConfig(name="ddp"), "cpu"),
    }
    size, rank = exchanges["ddp"].size, exchanges["ddp"].rank
    seen: dict[str, Any] = {"resumed elsewhere": resume_elsewhere(folder, exchanges["horovod"])}
    for engine in ENGINES if size > 1 else ():
        for way in WAYS:
            seen[f"{way}, {engine}"] = run(way, engine, exchanges[engine], folder)
        for way in ("fp16", "powersgd"):
            seen[f"{way}, {engine}, broken"] = break_one(way, engine, exchanges[engine])
    (folder / f"seen-{rank}-of-{size}.json").write_text(json.dumps(seen))
    for exchange in exchanges.values():
        exchange.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
