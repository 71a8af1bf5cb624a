"""The training loop of one rank: epochs, early stopping, checkpoints and the result."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tasks.contracts import EpochMetrics
from tasks.errors import TrainingError
from tasks.training.checkpoints.files import (
    State,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    serialized,
    write_file,
)
from tasks.training.config import TrainingConfig
from tasks.training.data.preprocess import Preprocessing
from tasks.training.data.shards import EpochSampler, ShardRows
from tasks.training.metrics import NUM_SCORE_BINS, histogram_auc, score_histograms
from tasks.training.model import TabularNetwork, export_program
from tasks.training.run_directory import ProgressReporter, RunDirectory, RunResult
from tasks.training.strategies.horovod_exchange import FlatGradients, HorovodExchange

LOGGER = logging.getLogger(__name__)
VALIDATION_BATCH_ROWS = 8192
MIN_STEPS_PER_EPOCH = 8
WARM_UP_SHARE = 0.2
START_RATE_SHARE = 0.04


@dataclass(frozen=True)
class RankTensors:
    """One rank's rows of one window as the network takes them, on the CPU."""

    positions: Tensor
    numeric: Tensor
    labels: Tensor

    @classmethod
    def of(cls, rows: ShardRows, preprocessing: Preprocessing) -> RankTensors:
        """Look up the categories of all rows once, before the first epoch."""
        positions = preprocessing.category_positions(rows.codes)
        return cls(
            torch.from_numpy(positions),
            torch.from_numpy(rows.numeric),
            torch.from_numpy(rows.labels),
        )

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, numbers and labels of some rows, on the device."""
        parts = (self.positions, self.numeric, self.labels)
        positions, numeric, labels = (part.index_select(0, rows).to(device) for part in parts)
        return positions, numeric, labels


@dataclass(frozen=True)
class StepPlan:
    """Steps of an epoch: the same on all ranks and for any number of ranks."""

    rows_per_shard: int
    num_steps: int

    @classmethod
    def of(cls, smallest_shard: int, config: TrainingConfig) -> StepPlan:
        """Plan epochs for shards of at least `smallest_shard` rows.

        A batch takes `global_batch_size` rows, or fewer where that would make less than
        `MIN_STEPS_PER_EPOCH` steps.
        """
        rows = config.global_batch_size // config.num_shards
        rows = min(rows, max(1, smallest_shard // MIN_STEPS_PER_EPOCH))
        return cls(rows_per_shard=rows, num_steps=smallest_shard // rows)


def one_cycle_rate(step: int, num_steps: int, peak: float) -> float:
    """Learning rate of a step: linear warm-up to the peak, then half a cosine down to 0.

    After Smith and Topin, "Super-Convergence" (2017). A function of the step alone, so there is no
    scheduler state to keep.
    """
    warm_up = WARM_UP_SHARE * num_steps
    if step < warm_up:
        return peak * (START_RATE_SHARE + (1 - START_RATE_SHARE) * step / warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (num_steps - warm_up)))


class TrainingLoop:
    """One rank's part in the training of one network. All public methods are collective.

    Args:
        network: with rank 0's parameters, on the CPU; moved to the device.
        preprocessing: what the network was built on.
        training: this rank's training rows.
        validation: this rank's validation rows; may be none.
        config: what to do.
        exchange: the other ranks.
        run: where rank 0 writes.
        progress: where this rank says what it does.
    """

    def __init__(
        self,
        network: TabularNetwork,
        preprocessing: Preprocessing,
        training: ShardRows,
        validation: ShardRows,
        config: TrainingConfig,
        exchange: HorovodExchange,
        run: RunDirectory,
        progress: ProgressReporter,
    ) -> None:
        self._started = time.monotonic()
        self._config = config
        self._exchange = exchange
        self._run = run
        self._progress = progress
        self._preprocessing = preprocessing
        self._device = torch.device(config.device)
        self._plan = StepPlan.of(exchange.minimum(min(training.sizes.values())), config)
        self._sampler = EpochSampler(
            training, self._plan.rows_per_shard, self._plan.num_steps, config.seed
        )
        self._training = RankTensors.of(training, preprocessing)
        self._validation = RankTensors.of(validation, preprocessing)
        self._network = network.to(self._device)
        self._gradients = FlatGradients(network.parameters())
        self._optimizer = _optimizer(network, config)
        self._history: list[EpochMetrics] = []
        self._best_epoch = -1
        self._best_weights: State = {}
        self._earlier_s = 0.0
        self._resume()

    def run(self) -> None:
        """Train until the last epoch or until validation no longer improves; write the result.

        Raises:
            TrainingError: the loss is no number, or the ranks' weights differ.
            StorageError: the disk refused a write.
        """
        self._announce_plan()
        for epoch in range(len(self._history), self._config.max_epochs):
            if epoch - self._best_epoch > self._config.patience and self._history:
                LOGGER.info("stopped early: epoch %d is still the best", self._best_epoch)
                break
            self._history.append(self._run_epoch(epoch))
            self._check_replicas(epoch)
            if self._improved():
                self._best_epoch = epoch
                self._best_weights = _copy_of_state(self._network)
            if self._exchange.rank == 0:
                self._save(epoch)
        if self._exchange.rank == 0:
            self._write_result()

    def _run_epoch(self, epoch: int) -> EpochMetrics:
        self._progress.enter("training")
        started = time.monotonic()
        train_loss = self._train_epoch(epoch)
        train_s = time.monotonic() - started
        self._progress.enter("validating")
        validation_loss, auc = self._validate()
        if not (math.isfinite(train_loss) and math.isfinite(validation_loss)):
            raise TrainingError(
                f"the loss of epoch {epoch} is {train_loss} in training and {validation_loss} in "
                f"validation; expected a number. Lower learning_rate={self._config.learning_rate}"
            )
        LOGGER.debug(
            "epoch %d: train loss %.4f, validation loss %.4f, validation AUC %.4f",
            epoch,
            train_loss,
            validation_loss,
            auc,
        )
        rows = self._plan.num_steps * self._plan.rows_per_shard * self._config.num_shards
        return EpochMetrics(
            epoch=epoch,
            train_loss=train_loss,
            validation_loss=validation_loss,
            validation_auc=auc,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            seconds=time.monotonic() - started,
            rows_per_s=rows / train_s,
        )

    def _train_epoch(self, epoch: int) -> float:
        """Mean loss over the epoch's steps and all ranks."""
        # Seeded anew for every epoch and rank: a resumed run draws what an unbroken one would have.
        torch.manual_seed(self._config.seed + 1_000_003 * epoch + 7_919 * self._exchange.rank)
        self._network.train()
        total = 0.0
        for step, rows in enumerate(self._sampler.batches(epoch)):
            self._set_learning_rate(epoch * self._plan.num_steps + step)
            self._gradients.clear()
            loss = self._loss(torch.from_numpy(rows))
            loss.backward()  # type: ignore[no-untyped-call]
            self._gradients.average(self._exchange)
            self._optimizer.step()
            total += loss.item()
            self._progress.step(epoch)
            if step == 0:
                LOGGER.debug("first step of epoch %d done", epoch)
        summed = self._exchange.sum(np.array([total]))
        return float(summed[0]) / (self._plan.num_steps * self._exchange.size)

    def _loss(self, rows: Tensor) -> Tensor:
        positions, numeric, labels = self._training.batch(rows, self._device)
        logits = self._network(positions, numeric)
        return functional.binary_cross_entropy_with_logits(logits, labels)

    def _set_learning_rate(self, step: int) -> None:
        num_steps = self._config.max_epochs * self._plan.num_steps
        for group in self._optimizer.param_groups:
            group["lr"] = one_cycle_rate(step, num_steps, self._config.learning_rate)

    @torch.no_grad()
    def _validate(self) -> tuple[float, float]:
        """Mean loss and AUC over all ranks' validation rows."""
        self._network.eval()
        # Two score histograms, then the sum of losses and the number of rows.
        totals = np.zeros(2 * NUM_SCORE_BINS + 2)
        for logits, labels in self._validation_logits():
            losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            scores = torch.sigmoid(logits).nan_to_num()  # what is no number shows in the loss
            totals[:-2] += score_histograms(scores.numpy(), labels.numpy()).ravel()
            totals[-2:] += (losses.double().sum().item(), len(labels))
            self._progress.step()
        totals = self._exchange.sum(totals)
        return float(totals[-2] / totals[-1]), histogram_auc(totals[:-2].reshape(2, -1))

    def _validation_logits(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.arange(len(self._validation.labels))
        for part in torch.split(rows, VALIDATION_BATCH_ROWS):
            positions, numeric, labels = self._validation.batch(part, self._device)
            if len(labels):
                yield self._network(positions, numeric).float().cpu(), labels.cpu()

    def _improved(self) -> bool:
        """Judged by AUC: a base rate that moves between the windows shifts the loss at random."""
        latest = self._history[-1]
        return self._best_epoch < 0 or (
            latest.validation_auc > self._history[self._best_epoch].validation_auc
        )

    def _check_replicas(self, epoch: int) -> None:
        """Refuse to go on with weights that differ between ranks: an exchange went wrong."""
        own = [p.detach().double().sum().item() for p in self._network.parameters()]
        LOGGER.debug("epoch %d: weights add up to %.12f", epoch, sum(own))
        if any(of_rank != own for of_rank in self._exchange.gather_values(own)):
            raise TrainingError(
                f"after epoch {epoch} the ranks' weights differ from rank {self._exchange.rank}'s; "
                "expected equal replicas. The exchange of gradients is broken on this machine"
            )

    def _announce_plan(self) -> None:
        rows = self._plan.rows_per_shard * self._config.num_shards
        if rows < self._config.global_batch_size and self._exchange.rank == 0:
            LOGGER.warning(
                "batches have %d rows, not global_batch_size=%d: the training rows would make "
                "fewer than %d steps an epoch",
                rows,
                self._config.global_batch_size,
                MIN_STEPS_PER_EPOCH,
            )

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint, which rank 0 chooses."""
        folder = self._run.checkpoints
        newest = newest_checkpoint(folder) if self._exchange.rank == 0 else None
        epoch = self._exchange.from_rank_0(-1 if newest is None else newest)
        if epoch < 0:
            return
        state = load_checkpoint(folder, epoch)
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._history = [EpochMetrics.model_validate(line) for line in state["history"]]
        self._best_epoch = state["best_epoch"]
        self._best_weights = state["best_weights"]
        self._earlier_s = state["seconds"]
        if self._exchange.rank == 0:
            self._run.rewrite_epochs(self._history)
            LOGGER.info("resumed after epoch %d of an earlier attempt", epoch)

    def _save(self, epoch: int) -> None:
        state: State = {
            "epoch": epoch,
            "seed": self._config.seed,  # with the epoch and the rank, all there is to randomness
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "history": [metrics.model_dump(mode="json") for metrics in self._history],
            "best_epoch": self._best_epoch,
            "best_weights": self._best_weights,
            "seconds": self._seconds(),
        }
        save_checkpoint(self._run.checkpoints, epoch, state)
        self._run.rewrite_epochs(self._history)

    def _write_result(self) -> None:
        self._progress.enter("exporting")
        self._network.load_state_dict(self._best_weights)
        best: State = {"epoch": self._best_epoch, "network": self._best_weights}
        write_file(self._run.best_checkpoint, serialized(best))
        write_file(self._run.program, export_program(self._network, self._preprocessing))
        self._run.write_result(
            RunResult(
                epochs=tuple(self._history),
                best_epoch=self._best_epoch,
                num_parameters=sum(p.numel() for p in self._network.parameters()),
                seconds=self._seconds(),
            )
        )

    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._started


def _optimizer(network: TabularNetwork, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW; only weight matrices decay, biases do not."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    biases = [p for p in network.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": biases, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        fused=True,
    )


def _copy_of_state(network: TabularNetwork) -> State:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
