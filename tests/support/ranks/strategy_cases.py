"""What every strategy is put through: networks, rows and configurations, and the plain answer.

A strategy joins the conformance test by its name in `ALL`, a way to train by a line in `VARIANTS`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.training.strategies.base import Batch, State
from tasks.training.strategies.config import StrategyConfig

NUM_STEPS = 20
HALF = NUM_STEPS // 2
MORE = range(HALF, HALF + 4)
"""The steps that a strategy takes from a state of another."""
GLOBAL_ROWS = 24
LEARNING_RATE = 5e-3
NUM_CATEGORIES = 7
NUM_NUMBERS = 6
WIDTH = 16
LONELY_STEP = 5
"""The step in which all rows are rank 0's."""


class Block(nn.Module):
    """A residual block with the parts of a transformer's feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(rows))))
        return rows + hidden


class SmallNetwork(nn.Module):
    """Embeddings as bare parameters, a buffer, a list of blocks and a head."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.randn(NUM_CATEGORIES, 5) * 0.1)])
        self.register_buffer("offset", torch.tensor([0.5]))
        self.entry = nn.Linear(NUM_NUMBERS + 5, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, positions: Tensor, numbers: Tensor) -> Tensor:
        embedded = functional.embedding(positions, self.tables[0])
        rows = self.entry(torch.cat([embedded, numbers - self.offset], dim=1))
        for block in self.blocks:
            rows = block(rows)
        logits: Tensor = self.head(rows).squeeze(1)
        return logits


@dataclass(frozen=True)
class Case:
    """One configuration of a strategy, and how near it must come to one plain process."""

    name: str
    config: StrategyConfig
    sizes: tuple[int, ...] = (1, 2, 3)
    loss_tolerance: float = 2e-5
    """Largest relative difference of any step's loss."""
    weight_tolerance: float = 5e-5
    """Largest absolute difference of any weight after the last step."""
    exchanges_states: bool = False
    """Its states are loaded by all such cases on all world sizes."""


LOOSE = {"loss_tolerance": 0.02, "weight_tolerance": 0.03}
NEARLY = {"loss_tolerance": 1e-3, "weight_tolerance": 5e-3}
# These take other steps on the way: what counts is that ranks agree and where they arrive.
LOOSER = {"loss_tolerance": 0.6, "weight_tolerance": 0.12}
EVERYTHING = {"precision": "bf16", "accumulation_steps": 2, "max_gradient_norm": 0.05}
ALL, REPLICAS = ("horovod", "ddp", "fsdp"), ("horovod", "ddp")
VARIANTS: tuple[tuple[str, tuple[str, ...], dict[str, Any], tuple[int, ...], dict[str, float]], ...]
VARIANTS = (
    ("accumulating", ALL, {"accumulation_steps": 3}, (2,), {}),
    ("clipped", ALL, {"max_gradient_norm": 0.05}, (2,), {}),
    ("bf16", ALL, {"precision": "bf16"}, (2,), LOOSE),
    ("fp16", ALL, {"precision": "fp16"}, (2,), LOOSE),
    ("sending fp16", REPLICAS, {"gradient_compression": "fp16"}, (2, 3), NEARLY),
    ("sending low ranks", REPLICAS, {"gradient_compression": "powersgd"}, (2, 3), LOOSER),
    ("4 local steps", REPLICAS, {"local_steps": 4}, (2,), LOOSER),
    ("asynchronous", REPLICAS, {"asynchronous": True, "local_steps": 2}, (2,), LOOSER),
    ("everything", ("horovod",), EVERYTHING, (2,), LOOSE),
)
"""What is done, by which strategies, the fields that ask for it, on so many ranks, how nearly."""


def _cases() -> Iterator[Case]:
    for name in ALL:
        yield Case(name, StrategyConfig(name=name), exchanges_states=True)
    for what, names, fields, sizes, near in VARIANTS:
        for name in names:
            yield Case(f"{name}, {what}", StrategyConfig(name=name, **fields), sizes, **near)


CASES = {case.name: case for case in _cases()}


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = [parameter for _, parameter in parameters]
    return torch.optim.AdamW(named, lr=LEARNING_RATE, weight_decay=0.1, eps=1e-6)


def row_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def halves_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other weights that fit the same network."""
    return {n: value / 2 if value.is_floating_point() else value for n, value in weights.items()}


def network_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return SmallNetwork()


def global_batch(step: int) -> Batch:
    """All ranks' rows of a step."""
    rng = np.random.default_rng(1000 + step)
    positions = rng.integers(0, NUM_CATEGORIES, GLOBAL_ROWS)
    numbers = rng.normal(size=(GLOBAL_ROWS, NUM_NUMBERS)).astype(np.float32)
    labels = (numbers.sum(1) + positions / 3 > 1).astype(np.float32)
    return Batch((torch.from_numpy(positions), torch.from_numpy(numbers)), torch.from_numpy(labels))


def share_of(batch: Batch, step: int, rank: int, size: int) -> Batch:
    """A rank's rows of a step: unequally many, and none for all but one rank in one step."""
    inner = np.sort(np.random.default_rng(step).integers(0, GLOBAL_ROWS + 1, size - 1))
    if step == LONELY_STEP:
        inner[:] = GLOBAL_ROWS
    cuts = [0, *(int(cut) for cut in inner), GLOBAL_ROWS]
    rows = slice(cuts[rank], cuts[rank + 1])
    return Batch(tuple(part[rows] for part in batch.inputs), batch.labels[rows])


@dataclass
class PlainRun:
    """One process, without any strategy: what all others must come to."""

    curve: list[float]
    weights: dict[str, Tensor]
    half_state: State


def plain_run(case: Case) -> PlainRun:
    """What the case must come to; cases of one clipping share it."""
    return _run_plainly(case.config.max_gradient_norm)


@cache
def _run_plainly(max_gradient_norm: float | None) -> PlainRun:
    """Train on whole global batches in plain PyTorch, in fp32 and without tricks but clipping."""
    network = network_of(seed=1)
    optimizer = adamw(network.named_parameters())
    curve: list[float] = []
    half_state: State = {}
    for step in range(NUM_STEPS):
        if step == HALF:
            half_state = _plain_state(network, optimizer)
        batch = global_batch(step)
        optimizer.zero_grad()
        loss = row_losses(network(*batch.inputs), batch.labels).mean()
        loss.backward()
        if max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), max_gradient_norm)
        optimizer.step()
        curve.append(loss.item())
    return PlainRun(curve, _plain_state(network, optimizer)["network"], half_state)


def _plain_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    fields = {
        f"{name}/{key}": value.clone()
        for name, parameter in network.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    weights = {name: value.detach().clone() for name, value in network.state_dict().items()}
    return {"network": weights, "optimizer": fields, "strategy": {}}
