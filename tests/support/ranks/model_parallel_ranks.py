"""One rank of the tests of tensor and pipeline parallel: `python -m ... FOLDER`.

Many checks in one process, since a rank takes seconds to start. What each rank saw is written to
FOLDER for the tests to judge.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tasks.kernel.errors import FalajError
from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.data.preprocess import Preprocessing
from tasks.training.strategies.base import Batch, Communicator, Strategy
from tasks.training.strategies.build import build_strategy, join
from tasks.training.strategies.config import StrategyConfig
from tests.support.ranks.strategy_cases import adamw, row_losses
from tests.support.training.networks import TOKENS, VOCABULARY, Transformer

CPU = torch.device("cpu")
NUM_STEPS = 6
HALF = NUM_STEPS // 2
LEARNING_RATE = 2e-3
SMALL_STEP, LONELY_STEP = 2, 4
"""A step with fewer rows than micro-batches, and one in which all rows are the first replica's."""


def tabular(dropout: float = 0.0) -> nn.Module:
    """The project's network, small; with layers that two ranks can share."""
    preprocessing = Preprocessing(
        vocabularies=tuple(np.arange(count, dtype=np.int32) for count in (4, 30)),
        edges=(np.linspace(-2, 2, 9).astype(np.float32),) * 5,
        flagged=(1,),
    )
    config = TrainingConfig(hidden_sizes=(32, 16), dropout=dropout, category_dropout=dropout)
    return TabularNetwork(preprocessing, config)


def tabular_batch(num_rows: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    positions = np.stack([rng.integers(0, size, num_rows) for size in (5, 31)], axis=1)
    numeric = rng.normal(size=(num_rows, 5)).astype(np.float32)
    labels = (numeric[:, 0] + positions[:, 0] / 2 > 1).astype(np.float32)
    numeric[rng.random(numeric.shape) < 0.1] = np.nan
    inputs = (torch.from_numpy(positions), torch.from_numpy(numeric))
    return Batch(inputs, torch.from_numpy(labels))


def partly_frozen() -> nn.Module:
    """A narrow transformer, one layer of which is not trained."""
    network = Transformer(width=16)
    network.layers[0].requires_grad_(False)
    return network


def token_batch(num_rows: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (num_rows, TOKENS))
    labels = ((tokens < 5).sum(axis=1) > 3).astype(np.float32)
    return Batch((torch.from_numpy(tokens),), torch.from_numpy(labels))


@dataclass(frozen=True)
class Case:
    """One way to cut one network."""

    fields: dict[str, object]
    network: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    rows: int = 24
    tolerance: float = 2e-5

    @property
    def config(self) -> StrategyConfig:
        return StrategyConfig.model_validate(self.fields)


NUM_RANKS = 4
TENSOR = {"name": "tensor-parallel", "tensor_parallel_size": 2}
PIPELINE = {"name": "pipeline-parallel", "pipeline_stages": 2}
ALL_TENSOR = {**TENSOR, "tensor_parallel_size": NUM_RANKS}
ALL_PIPELINE = {**PIPELINE, "pipeline_stages": NUM_RANKS}
CLIPPED = {"max_gradient_norm": 0.05, "accumulation_steps": 3}
BF16 = {"precision": "bf16"}
RECOMPUTED = {"activation_checkpointing": True}
CASES = {
    "tabular, tensor": Case(TENSOR, tabular, tabular_batch),
    "tabular, tensor, clipped": Case({**TENSOR, **CLIPPED}, tabular, tabular_batch),
    "tabular, tensor, dropping": Case(ALL_TENSOR, lambda: tabular(0.4), tabular_batch),
    "tabular, tensor, bf16": Case({**TENSOR, **BF16}, tabular, tabular_batch, tolerance=0.02),
    "tabular, pipeline, bf16": Case({**PIPELINE, **BF16}, tabular, tabular_batch, tolerance=0.02),
    "transformer, tensor": Case(ALL_TENSOR, Transformer, token_batch, rows=6),
    "tabular, pipeline": Case(PIPELINE, tabular, tabular_batch),
    "tabular, pipeline, clipped": Case({**PIPELINE, **CLIPPED}, tabular, tabular_batch),
    "transformer, pipeline": Case({**PIPELINE, **RECOMPUTED}, Transformer, token_batch, rows=6),
    "narrow, tensor, partly frozen": Case(ALL_TENSOR, partly_frozen, token_batch, rows=9),
    "narrow, four stages": Case(ALL_PIPELINE, lambda: Transformer(width=16), token_batch, rows=9),
}


def global_batch(case: Case, step: int) -> Batch:
    """All replicas' rows of a step."""
    return case.batch(3 if step == SMALL_STEP else case.rows, 100 + step)


def share_of(batch: Batch, step: int, replica: int, num_replicas: int) -> Batch:
    """A replica's rows of a step: unequally many, and none for all but one in one step."""
    first = batch.num_rows if step == LONELY_STEP else batch.num_rows * 2 // 3
    cuts = [0, first, batch.num_rows] if num_replicas == 2 else [0, batch.num_rows]
    rows = slice(cuts[replica], cuts[replica + 1])
    return Batch(tuple(part[rows] for part in batch.inputs), batch.labels[rows])


def network_of(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.network()


def run(case: Case, exchange: Communicator, folder: Path, name: str) -> dict[str, Any]:
    """All steps, with a state taken in the middle and loaded into another strategy."""
    strategy = _build(case, exchange, seed=1 + exchange.rank)
    curve = _train(case, strategy, exchange, range(HALF))
    half = strategy.state()
    curve += _train(case, strategy, exchange, range(HALF, NUM_STEPS))
    end = strategy.state()
    if exchange.rank == 0:
        torch.save(end, folder / f"{name}.pt")
    other = _build(case, exchange, seed=77)
    other.load(half)
    again = _train(case, other, exchange, range(HALF, NUM_STEPS))
    outputs = strategy.evaluate(global_batch(case, 0).inputs)
    fewer = strategy.evaluate(tuple(part[:5] for part in global_batch(case, 1).inputs))
    none = strategy.evaluate(tuple(part[:0] for part in global_batch(case, 1).inputs))
    held = list(strategy._stepped_parameters())  # type: ignore[attr-defined]
    return {
        "curve": curve,
        "again": again,
        "checksum": strategy.checksum(),
        "outputs": outputs.tolist(),
        "fewer": fewer.tolist(),
        "none": list(none.shape),
        "bytes": sum(p.numel() * p.element_size() for _, p in held),
        "moment_bytes": sum(t.nbytes for t in strategy._optimizer.tensors()),  # type: ignore[attr-defined]
        "wire_bytes": strategy.wire_bytes,
        "data": [strategy.data_rank, strategy.data_size],
    }


def _build(case: Case, exchange: Communicator, seed: int) -> Strategy:
    network = network_of(case, seed)
    return build_strategy(case.config, exchange, network, row_losses, adamw, CPU)


def _train(case: Case, strategy: Strategy, exchange: Communicator, steps: range) -> list[float]:
    curve = []
    for step in steps:
        batch = global_batch(case, step)
        share = share_of(batch, step, strategy.data_rank, strategy.data_size)
        # Ranks' generators differ: what must be drawn alike is the strategy's matter.
        torch.manual_seed(1000 * exchange.rank + step)
        loss = strategy.train_step(share, batch.num_rows, LEARNING_RATE).item()
        copies = exchange.size // strategy.data_size
        curve.append(float(exchange.sum(np.array([loss]))[0]) / copies / batch.num_rows)
    return curve


def refusals(exchange: Communicator) -> dict[str, str]:
    """What is said of networks and ranks that cannot be cut."""
    asked: dict[str, tuple[dict[str, object], nn.Module]] = {
        "no plan": (TENSOR, nn.Linear(4, 1)),
        "no stages": (PIPELINE, nn.Linear(4, 1)),
        "odd layer": (TENSOR, _tabular_of(15, 16)),
        "odd heads": (ALL_TENSOR, Transformer(24, 1, 3)),
        "few blocks": (ALL_PIPELINE, tabular()),
        "few ranks": ({**TENSOR, "tensor_parallel_size": 3}, _tabular_of(15, 6)),
        "tied": (PIPELINE, _Tied()),
        "frozen": (PIPELINE, _with_frozen_head()),
    }
    said = {}
    for name, (fields, network) in asked.items():
        config = StrategyConfig.model_validate(fields)
        try:
            build_strategy(config, exchange, network, row_losses, adamw, CPU)
            said[name] = "nothing"
        except FalajError as exc:
            said[name] = f"{type(exc).__name__}: {exc}"
    return said


def _tabular_of(*hidden_sizes: int) -> nn.Module:
    preprocessing = Preprocessing((np.arange(3, dtype=np.int32),), (), ())
    return TabularNetwork(preprocessing, TrainingConfig(hidden_sizes=hidden_sizes))


def _with_frozen_head() -> nn.Module:
    network = Transformer(width=8)
    for layer in (*network.layers[1:], network.head):
        layer.requires_grad_(False)
    return network


class _Tied(nn.Module):
    """One layer used in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        return [nn.Sequential(self.layer) for _ in range(num_stages)]


def broken(exchange: Communicator, name: str) -> dict[str, Any]:
    """A number of the last replica's rows is infinite; then no step may change a weight."""
    case = CASES[name]
    strategy = _build(case, exchange, seed=1)
    before = strategy.checksum()
    share = case.batch(6, strategy.data_rank)
    if strategy.data_rank == strategy.data_size - 1:
        share = Batch(share.inputs, share.labels * float("inf"))
    try:
        strategy.train_step(share, 6 * strategy.data_size, LEARNING_RATE)
        said = "nothing"
    except FalajError as exc:
        said = f"{type(exc).__name__}: {exc}"
    return {"said": said, "kept": strategy.checksum() == before}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    exchange = join(StrategyConfig(name="ddp"), "cpu")
    seen: dict[str, Any] = {name: run(case, exchange, folder, name) for name, case in CASES.items()}
    seen["refused"] = refusals(exchange)
    seen["broken"] = {n: broken(exchange, n) for n in ("tabular, tensor", "tabular, pipeline")}
    (folder / f"seen-{exchange.rank}.json").write_text(json.dumps(seen))
    exchange.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
