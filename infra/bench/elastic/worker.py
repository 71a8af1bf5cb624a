"""A rank program of elastic training: a tiny network, trained on Horovod as the real one is.

The same steps give the same weights whatever ranks take part, so an interrupted run can be compared
with an unbroken one. The run directory holds the job; every step that a group did is noted there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional

from tasks.training.elastic.commits import CommitPoint
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.rank import run_elastic
from tasks.training.strategies.base import Communicator, State
from tasks.training.strategies.communicators import HorovodCommunicator

NUM_SHARDS = 6
ROWS_PER_SHARD = 16
NUM_FEATURES = 8


class TinyJob(BaseModel):
    """What the ranks are asked to do."""

    config: ElasticConfig
    num_steps: int = 100
    step_s: float = 0.02
    patient: bool = False
    """True where steps take 25 times as long until the file `go` is in the run directory."""
    failing_step: int = -1
    """The step in which a rank of user code fails."""
    mismatch: bool = False
    """True where ranks exchange tensors of different sizes."""
    dies_while_joining: bool = False
    """True where rank 1 is killed just before it meets the others for the first time."""
    width: int = 16


class TinySession:
    """Trains two layers on rows that depend on shard and step alone."""

    def __init__(self, run: Path, job: TinyJob) -> None:
        torch.set_num_threads(1)
        self._run, self._job = run, job
        self._network = network(self._job.width)
        self._optimizer = optimizer(self._network)
        self._step = 0
        if (newest := run / "checkpoint.pt").exists():
            self.restore(torch.load(newest, weights_only=True))

    def rejoin(self, ranks: Communicator) -> None:
        """See `ElasticSession`."""
        self._ranks = ranks
        self._shards = [s for s in range(NUM_SHARDS) if s % ranks.size == ranks.rank]

    def snapshot(self) -> State:
        """See `ElasticSession`."""
        self._ranks.minimum(1)  # a network that is cut over ranks is put together here
        return {
            "step": self._step,
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def restore(self, state: State) -> None:
        """See `ElasticSession`."""
        self._step = state["step"]
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])

    def run(self, commit_point: CommitPoint) -> None:
        """See `ElasticSession`."""
        while self._step < self._job.num_steps:
            self._train_step()
            commit_point()
        if self._ranks.rank == 0:
            weights = [p.flatten().tolist() for p in self._network.parameters()]
            aside = self._run / "result.aside"
            aside.write_text(json.dumps(weights))
            aside.replace(self._run / "result.json")

    def checkpoint(self, state: State) -> None:
        """See `ElasticSession`."""
        if self._ranks.rank == 0:
            torch.save(state, self._run / "checkpoint.pt")

    def _train_step(self) -> None:
        if self._step == self._job.failing_step and self._ranks.rank == 0:
            raise ValueError("column 'age' has NaN in row 17")
        backward(self._network, self._step, self._shards)
        patient = self._job.patient and not (self._run / "go").exists()
        time.sleep(self._job.step_s * (25 if patient else 1))
        if self._job.mismatch:
            hvd.allreduce(torch.zeros(1 + self._ranks.rank), name="mismatch")
        self._sum_gradients()
        self._optimizer.step()
        self._step += 1
        self._note()

    def _sum_gradients(self) -> None:
        for parameter in self._network.parameters():
            assert parameter.grad is not None
            self._ranks.sum_(parameter.grad)

    def _note(self) -> None:
        if self._ranks.rank == 0:
            line = json.dumps([time.time(), self._step, self._ranks.size])
            with (self._run / "steps.jsonl").open("a") as stream:
                stream.write(f"{line}\n")


def network(width: int) -> nn.Module:
    """The same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


def optimizer(trained: nn.Module) -> torch.optim.Optimizer:
    """With a state; and unlike Adam it does not make much of the last bits of a small gradient."""
    width = next(trained.parameters()).shape[0]
    return torch.optim.SGD(trained.parameters(), lr=0.5 / width, momentum=0.9)


def rows_of(step: int, shard: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one shard in one step."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    inputs = torch.randn(ROWS_PER_SHARD, NUM_FEATURES, generator=generator)
    return inputs, (inputs.sum(1, keepdim=True) > 0).float()


def backward(trained: nn.Module, step: int, shards: list[int]) -> None:
    """Gradients of the given shards' part in the loss of a step; zeros without shards."""
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for shard in shards:
        inputs, labels = rows_of(step, shard)
        losses = functional.binary_cross_entropy_with_logits(
            trained(inputs), labels, reduction="sum"
        )
        mean = losses / (NUM_SHARDS * ROWS_PER_SHARD)
        mean.backward()  # type: ignore[no-untyped-call]


def unbroken(num_steps: int, width: int) -> list[list[float]]:
    """The weights of one process that nothing disturbs."""
    trained = network(width)
    stepping = optimizer(trained)
    for step in range(num_steps):
        backward(trained, step, list(range(NUM_SHARDS)))
        stepping.step()
    return [p.flatten().tolist() for p in trained.parameters()]


def main(run_path: str) -> None:
    """Be one rank."""
    run = Path(run_path)
    job = TinyJob.model_validate_json((run / "job.json").read_text())

    def join_ranks() -> HorovodCommunicator:
        died = run / "died"
        if job.dies_while_joining and os.environ["HOROVOD_RANK"] == "1" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return HorovodCommunicator()

    run_elastic(lambda: TinySession(run, job), job.config, join_ranks)


if __name__ == "__main__":
    main(sys.argv[1])
