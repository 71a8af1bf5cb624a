"""One rank that puts strategies through their paces: `python -m ... FOLDER DEVICE CASE...`.

Many checks in one process, since a rank takes seconds to start. What rank 0 and the others saw is
written to FOLDER for the tests to judge.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import Batch, Communicator, State
from tasks.training.strategies.communicators import join
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import Strategy, strategy_class
from tests.support.ranks.strategy_cases import (
    CASES,
    HALF,
    LEARNING_RATE,
    MORE,
    NUM_STEPS,
    Case,
    adamw,
    global_batch,
    halves_of,
    network_of,
    row_losses,
    share_of,
)


def main(folder: Path, device: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    exchanges = {
        "horovod": join(StrategyConfig(), device),
        "torch": join(StrategyConfig(name="ddp"), device),
    }
    if device == "cuda":
        torch.cuda.set_device(exchanges["torch"].local_rank)
    ranks = Ranks(folder, exchanges, torch.device(device))
    for name in names:
        ranks.run(CASES[name])
    ranks.interchange([CASES[name] for name in names if CASES[name].exchanges_states])
    ranks.check_exchanges()
    ranks.break_gradients(["horovod", "ddp", "fsdp"])
    ranks.close()


class Ranks:
    """The checks of one rank; all ranks call the same ones."""

    def __init__(
        self, folder: Path, exchanges: dict[str, Communicator], device: torch.device
    ) -> None:
        self._folder = folder
        self._device = device
        self._exchanges = exchanges
        self._seen: dict[str, Any] = {}
        self._size = exchanges["torch"].size

    def _build(self, case: Case, seed: int) -> Strategy:
        exchange = self._exchanges[case.config.engine]
        network = network_of(seed + exchange.rank)
        build = strategy_class(case.config)
        return build(case.config, exchange, network, row_losses, adamw, self._device)

    def _train(self, strategy: Strategy, steps: range) -> list[float]:
        """The losses of some steps, over all ranks and rows."""
        curve = []
        for step in steps:
            batch = global_batch(step)
            share = share_of(batch, step, strategy.ranks.rank, self._size)
            own = strategy.train_step(share, batch.num_rows, LEARNING_RATE).item()
            curve.append(float(self._exchanges["torch"].sum(np.array([own]))[0]) / batch.num_rows)
        return curve

    def run(self, case: Case) -> None:
        """All steps, with a state taken in the middle."""
        if self._size not in case.sizes:
            return
        strategy = self._build(case, seed=1)
        curve = self._train(strategy, range(HALF))
        halved: list[float] = []
        if case.exchanges_states:
            half = strategy.state()
            self._save(f"{case.name}-half", half)
            with strategy.judged_with(halves_of(half["network"])):
                halved = strategy.evaluate(global_batch(0).inputs).tolist()
        curve += self._train(strategy, range(HALF, NUM_STEPS))
        self._save(f"{case.name}-end", strategy.state())
        batch = global_batch(0)
        self._seen[case.name] = {
            "curve": curve,
            "checksum": strategy.checksum(),
            "outputs": strategy.evaluate(batch.inputs).tolist(),
            "halved": halved,
            "wire_bytes": strategy.wire_bytes,
        }

    def interchange(self, cases: list[Case]) -> None:
        """Go on from every state that is there, of any strategy and world size."""
        for case in (case for case in cases if self._size in case.sizes):
            for path in sorted(self._folder.glob("*-half.of-*.pt")):
                strategy = self._build(case, seed=99)
                strategy.load(torch.load(path, weights_only=True))
                self._seen[f"{case.name} from {path.stem}"] = self._train(strategy, MORE)

    def check_exchanges(self) -> None:
        """Each collective, on both engines."""
        for engine, exchange in self._exchanges.items():
            self._seen[f"exchange {engine}"] = exchange_answers(exchange)

    def break_gradients(self, names: list[str]) -> None:
        """A value of the last rank's rows is infinite; then no step may change a weight."""
        for name in names:
            strategy = self._build(CASES[name], seed=1)
            before = strategy.checksum()
            batch = global_batch(0)
            share = share_of(batch, 0, strategy.ranks.rank, self._size)
            if strategy.ranks.rank == self._size - 1:
                share = broken(batch)
            try:
                strategy.train_step(share, batch.num_rows, LEARNING_RATE)
                said = "nothing"
            except TrainingError as exc:
                said = str(exc)
            kept = strategy.checksum() == before
            self._seen[f"{name} broken"] = {"said": said, "kept": kept}

    def _save(self, name: str, state: State) -> None:
        """Rank 0's word; every rank has the same."""
        if self._exchanges["torch"].rank == 0:
            torch.save(state, self._folder / f"{name}.of-{self._size}.pt")

    def close(self) -> None:
        rank = self._exchanges["torch"].rank
        path = self._folder / f"seen-{rank}-of-{self._size}.json"
        path.write_text(json.dumps(self._seen))
        for exchange in self._exchanges.values():
            exchange.shut_down()


def broken(batch: Batch) -> Batch:
    """Rows one of which holds a number that the network cannot bear."""
    positions, numbers = (part.clone() for part in batch.inputs)
    numbers[3, 0] = float("inf")
    return Batch((positions, numbers), batch.labels)


def exchange_answers(exchange: Communicator) -> dict[str, Any]:
    """What each collective gives this rank."""
    rank = exchange.rank
    tensor = torch.full((3,), float(rank + 1))
    exchange.sum_(tensor)
    first, second = torch.ones(4) * rank, torch.ones(5)
    waits = [exchange.begin_sum_(first, "first"), exchange.begin_sum_(second, "second")]
    for wait in waits:
        wait()
    kinds = [
        torch.full((2,), float(rank)),
        torch.tensor(rank == 0),
        torch.tensor([[rank]], dtype=torch.int64),
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.full((2, 2), float(rank)).t(),
    ]
    exchange.broadcast_(kinds)
    return {
        "sum_": tensor.tolist(),
        "begun": [first.tolist(), second.tolist()],
        "sum": exchange.sum(np.array([rank, 1.5])).tolist(),
        "minimum": exchange.minimum(5 - rank),
        "from_rank_0": exchange.from_rank_0(rank + 7),
        "rows": exchange.gather_rows(np.full((rank, 2), rank, dtype=np.float32)).tolist(),
        "values": exchange.gather_values({"rank": rank, "text": "x" * rank}),
        "broadcast": [kind.float().tolist() for kind in kinds],
        "local": [exchange.local_rank, exchange.local_size],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
