"""The training of one rank: steps, epochs, early stopping, checkpoints and the result.

All state between two steps is one value (`TrainingSession.snapshot`). Checkpoints hold it, ranks
that join get it from rank 0, and ranks that lost a partner go back to it. It fits in the middle of
an epoch and on any number of ranks, because the rows of a step, its learning rate and its
randomness are functions of its number alone.
"""

import logging
import math
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import nn

from tasks.contracts.training import EpochMetrics
from tasks.kernel.errors import TrainingError
from tasks.kernel.files import write_atomically
from tasks.training.checkpoints.store import agreed_newest, serialized
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.core import objective
from tasks.training.core.network import TabularNetwork, export_program
from tasks.training.core.run_directory import RunDirectory, RunResult, TrainingJob
from tasks.training.core.warm_start import Fitted, warm_start
from tasks.training.data.opening import Sources, open_sources
from tasks.training.data.source import BLOCK_ROWS
from tasks.training.elastic.commits import CommitPoint
from tasks.training.models.own import ModelColumns, build, check_module, export_own, own_losses
from tasks.training.strategies.base import Batch, Communicator, State
from tasks.training.strategies.data_parallel import Strategy, strategy_class
from tasks.training.telemetry.step_clock import StepClock, StepProfiler

LOGGER = logging.getLogger(__name__)
# A question to rank 0 costs all ranks a collective of a few bytes.
STEPS_BETWEEN_QUESTIONS = 32


class TrainingSession:
    """One rank's part in training one network; `ElasticSession` calls what when.

    All public methods are collective.

    Args:
        job: what to do.
        run: where rank 0 writes.
        writer: where checkpoints are, and how rank 0 writes them.
    """

    def __init__(self, job: TrainingJob, run: RunDirectory, writer: CheckpointWriter) -> None:
        self._started = time.monotonic()
        self._job = job
        self._config = job.config
        self._run = run
        self._store, self._writer = writer.store, writer
        self._ranks: Communicator
        self._clock: StepClock
        self._sources: Sources
        self._objective: objective.Objective
        self._strategy: Strategy
        self._is_new = True
        self._history: list[EpochMetrics] = []
        self._step = 0
        """Steps done of the epoch `len(self._history)`."""
        self._loss_sum = 0.0
        """Of those steps, over all ranks, but for `self._own_loss`."""
        self._own_loss = torch.zeros((), dtype=torch.float64)
        self._averaged: State = {}
        """Mean of the weights at the ends of epochs; what is judged, kept and served."""
        self._best_epoch = -1
        self._best_weights: State = {}
        self._earlier_s = 0.0
        self._steps_to_ask = STEPS_BETWEEN_QUESTIONS
        self._open = ExitStack()
        self._profiler: StepProfiler | None = None

    # Joining others

    def rejoin(self, exchange: Communicator) -> None:
        """Read the shards that are this rank's among the others, and build the network.

        Where rank 0 has done nothing yet, all resume from the newest complete checkpoint.
        """
        self.close()
        self._ranks = exchange
        self._clock = self._open.enter_context(StepClock(self._run.path, exchange.rank))
        is_own = self._config.own_model is not None
        if is_own and self._is_new and exchange.rank == 0:
            self._clock.begin("checking the module")
            check_module(self._job)
        self._clock.begin("reading rows")
        self._sources = open_sources(self._job, exchange, self._run, self._clock.advance)
        self._clock.begin("building the network")
        torch.manual_seed(self._config.seed)
        fitted = self._sources.preprocessing
        self._objective = objective.objective_of(fitted.num_outputs, fitted.labels)
        network = self._network()
        if is_own:
            self._objective.row_losses = own_losses(network, self._objective)
        self._strategy = strategy_class(self._config.strategy)(
            self._config.strategy,
            exchange,
            network,
            self._objective.training_losses(self._job.distillation),
            partial(objective.adamw, config=self._config),
            torch.device(self._config.device),
        )
        self._strategy.phase = lambda _: self._clock.phase("exchange")
        self._resume()

    def _network(self) -> nn.Module:
        """The network that is asked for, freshly drawn."""
        job, fitted = self._job, self._sources.preprocessing
        if self._config.own_model is None:
            return TabularNetwork(fitted, self._config)
        columns = ModelColumns.of(job.columns, fitted)
        return build(self._config.own_model, job.project, columns, self._config)

    def _resume(self) -> None:
        """Resume from the newest complete checkpoint, if there is one and rank 0 is new."""
        is_wanted = bool(self._ranks.from_rank_0(int(self._is_new)))
        chosen = agreed_newest(self._store, self._ranks) if is_wanted else None
        if chosen is None:
            self._begin_with_champion()
            return
        self.restore(self._store.load(chosen))
        if self._ranks.rank == 0:
            where = f"{self._step} steps into epoch {len(self._history)}"
            if self._step == 0:
                where = f"after epoch {len(self._history) - 1}"
            LOGGER.info("resumed %s of an earlier attempt", where)

    def _begin_with_champion(self) -> None:
        """Take over the weights that the job names, as far as they mean the same."""
        if self._job.initial_path is None or self._job.initial_columns is None:
            return
        if self._job.initial_columns.classes != self._job.columns.classes:
            LOGGER.info("began from scratch: the champion tells other classes apart")
            return
        champion = torch.load(self._job.initial_path, map_location="cpu", weights_only=True)
        state = self._strategy.state()
        fitted = Fitted(self._sources.preprocessing, self._job.columns)
        earlier = Fitted.from_state(champion.get("preprocessing"), self._job.initial_columns)
        weights, lines = warm_start(state["network"], fitted, champion["network"], earlier)
        self._strategy.load({**state, "network": weights})
        if self._ranks.rank == 0:
            LOGGER.info("took over the champion's weights, but for %d thing(s)", len(lines))
            for line in lines:
                LOGGER.info("not taken over: %s", line)

    def snapshot(self) -> State:
        """All that is needed to go on from between two steps; tensors may be the live ones."""
        trained = self._strategy.state()
        self._add_own_loss()
        return {
            "epoch": len(self._history),
            "step": self._step,
            "loss_sum": self._loss_sum,
            **trained,
            "history": [metrics.model_dump(mode="json") for metrics in self._history],
            "averaged": self._averaged,
            "best_epoch": self._best_epoch,
            "best_weights": self._best_weights,
            "seconds": self._seconds(),
        }

    def restore(self, state: State) -> None:
        """Take over what `snapshot` gave on this or another rank, in a group of any size."""
        self._is_new = False
        self._strategy.load(state)
        self._history = [EpochMetrics.model_validate(line) for line in state["history"]]
        self._step = state["step"]
        self._loss_sum = state["loss_sum"]
        self._own_loss.zero_()
        self._averaged = state["averaged"]
        self._best_epoch = state["best_epoch"]
        self._best_weights = state["best_weights"]
        self._earlier_s = state["seconds"]
        self._started = time.monotonic()
        if self._ranks.rank == 0:
            self._run.rewrite_epochs(self._history)

    def checkpoint(self, state: State) -> None:
        """Rank 0: write a state, from `snapshot`, so that it outlives all ranks."""
        if self._ranks.rank == 0:
            self._store.save(state["epoch"], state["step"], state)

    def close(self) -> None:
        """Stop reading and measuring."""
        self._open.close()

    # Training

    def run(self, commit_point: CommitPoint) -> None:
        """Train until the last epoch or until validation no longer improves; write the result.

        Args:
            commit_point: called after every step.

        Raises:
            TrainingError: the loss is no number, or the ranks' weights differ.
            DataContractError, TransientError: rows could not be read.
            StorageError: the disk refused a write.
        """
        self._is_new = False
        self._warn_of_small_batches()
        with ExitStack() as profiled:
            if self._config.telemetry.profile:
                on_horovod = self._config.strategy.engine == "horovod"
                profiler = StepProfiler(self._run.path, self._ranks.rank, with_timeline=on_horovod)
                self._profiler = profiled.enter_context(profiler)
            while not self._is_done():
                self._run_epoch(commit_point)
        if self._ranks.rank == 0:
            self._write_result()

    def _is_done(self) -> bool:
        num_epochs = len(self._history)
        if num_epochs and num_epochs - self._best_epoch > self._config.patience:
            LOGGER.info("stopped early: epoch %d is still the best", self._best_epoch)
            return True
        return num_epochs >= self._config.max_epochs

    def _run_epoch(self, commit_point: CommitPoint) -> None:
        epoch, first_step, started = len(self._history), self._step, time.monotonic()
        self._clock.begin("training", self._sources.plan.num_steps)
        self._train(epoch, commit_point)
        train_s = time.monotonic() - started
        self._add_own_loss()
        self._clock.begin("validating")
        with self._clock.phase("validate"):
            newest, decay = self._strategy.state()["network"], self._config.average_decay
            self._averaged = objective.averaged(self._averaged, newest, epoch + 1, decay)
            with self._strategy.judged_with(self._averaged):
                validation_loss, quality = self._validate()
        plan = self._sources.plan
        metrics = EpochMetrics(
            epoch=epoch,
            train_loss=self._loss_sum / (plan.num_steps * self._rows_per_step),
            validation_loss=validation_loss,
            **quality,
            learning_rate=self._rate((epoch + 1) * plan.num_steps - 1),
            seconds=time.monotonic() - started,
            rows_per_s=(plan.num_steps - first_step) * self._rows_per_step / train_s,
        )
        self._check_losses(metrics)
        self._check_replicas(epoch)
        self._close_epoch(metrics)

    def _train(self, epoch: int, commit_point: CommitPoint) -> None:
        """The steps of an epoch that are still to be done."""
        batches = self._sources.training.batches(epoch, self._step)
        try:
            while (batch := self._next(batches)) is not None:
                with self._clock.phase("compute"):
                    self._train_on(batch, epoch)
                self._clock.step()
                if self._profiler is not None:
                    self._profiler.step()
                commit_point()
                self._checkpoint_now_and_then()
        finally:
            batches.close()

    def _next(self, batches: Generator[Batch, None, None]) -> Batch | None:
        with self._clock.phase("data"):
            return next(batches, None)

    def _train_on(self, batch: Batch, epoch: int) -> None:
        step = epoch * self._sources.plan.num_steps + self._step
        # Seeded anew for every step and rank: a run that was cut off anywhere draws what an
        # unbroken one would have.
        torch.manual_seed(self._config.seed + 1_000_003 * step + 7_919 * self._ranks.rank)
        sent_bytes = self._strategy.wire_bytes
        rate = self._rate(step)
        self._own_loss += self._strategy.train_step(batch, self._rows_per_step, rate).cpu()
        self._clock.add_rows(batch.num_rows)
        self._clock.add_bytes(self._strategy.wire_bytes - sent_bytes)
        self._step += 1
        self._clock.advance(epoch, self._step)

    @property
    def _rows_per_step(self) -> int:
        return self._sources.plan.rows_per_shard * self._config.num_shards

    def _rate(self, step: int) -> float:
        num_steps = self._config.max_epochs * self._sources.plan.num_steps
        return objective.one_cycle_rate(step, num_steps, self._config.learning_rate)

    def _add_own_loss(self) -> None:
        """Bring the loss of the steps since the last time together. Collective."""
        self._loss_sum += float(self._ranks.sum(np.array([self._own_loss.item()]))[0])
        self._own_loss.zero_()

    # The end of an epoch

    def _validate(self) -> tuple[float, dict[str, float]]:
        """Mean loss and quality over all ranks' validation rows."""
        # What the quality is made of, then the sum of losses and the number of rows.
        totals = np.zeros(self._objective.num_totals + 2)
        for block in self._blocks_in_step():
            outputs = self._strategy.evaluate(block.inputs)
            labels = objective.labels_of(block.labels)
            losses = self._objective.row_losses(outputs, labels)
            totals[:-2] += self._objective.totals(outputs, labels)
            totals[-2:] += (losses.double().sum().item(), block.num_rows)
            self._clock.advance()
        totals = self._ranks.sum(totals)
        return float(totals[-2] / totals[-1]), self._objective.quality(totals[:-2])

    def _blocks_in_step(self) -> Iterator[Batch]:
        """This rank's validation rows in as many blocks as the rank with most of them has.

        Where ranks share a network, evaluating is a collective, which none may leave out.
        """
        validation = self._sources.validation
        num_blocks = sum(-(-size // BLOCK_ROWS) for size in validation.sizes.values())
        left = -self._ranks.minimum(-num_blocks)
        for block in validation.blocks():
            yield block
            left -= 1
        for _ in range(left):
            yield validation.empty(0)

    def _check_losses(self, metrics: EpochMetrics) -> None:
        if not (math.isfinite(metrics.train_loss) and math.isfinite(metrics.validation_loss)):
            raise TrainingError(
                f"the loss of epoch {metrics.epoch} is {metrics.train_loss} in training and "
                f"{metrics.validation_loss} in validation; expected a number. Lower "
                f"learning_rate={self._config.learning_rate}"
            )

    def _check_replicas(self, epoch: int) -> None:
        """Refuse to go on with weights that differ between ranks: a collective went wrong."""
        own = self._strategy.checksum()
        LOGGER.debug("epoch %d: weights add up to %.12f", epoch, sum(own))
        if any(of_rank != own for of_rank in self._ranks.gather_values(own)):
            raise TrainingError(
                f"after epoch {epoch} the ranks' weights differ from rank {self._ranks.rank}'s; "
                "expected equal replicas. The exchange of gradients is broken on this machine"
            )

    def _close_epoch(self, metrics: EpochMetrics) -> None:
        self._history.append(metrics)
        self._step, self._loss_sum = 0, 0.0
        LOGGER.debug(
            "epoch %d: train loss %.4f, validation loss %.4f, quality %.4f",
            metrics.epoch,
            metrics.train_loss,
            metrics.validation_loss,
            metrics.quality,
        )
        # Judged by the objective's quality, not by the loss.
        if self._best_epoch < 0 or metrics.quality > self._history[self._best_epoch].quality:
            self._best_epoch = metrics.epoch
            self._best_weights = self._averaged
        self._save()

    # What is written

    def _checkpoint_now_and_then(self) -> None:
        """Within an epoch, as often as rank 0 finds it due; asked at steps that all agree on."""
        self._steps_to_ask -= 1
        if self._steps_to_ask > 0 or self._step == self._sources.plan.num_steps:
            return
        is_due = bool(self._ranks.from_rank_0(int(self._writer.is_due)))
        self._steps_to_ask = STEPS_BETWEEN_QUESTIONS
        if is_due:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint, and report the epochs in it once it is complete."""
        state = self.snapshot()
        if self._ranks.rank == 0:
            report = partial(self._run.rewrite_epochs, list(self._history))
            with self._clock.phase("checkpoint"):
                self._writer.save(state["epoch"], state["step"], state, then=report)

    def _warn_of_small_batches(self) -> None:
        rows = self._rows_per_step
        if self._ranks.rank == 0 and rows < self._config.global_batch_size:
            LOGGER.warning(
                "batches have %d rows, not global_batch_size=%d: the training rows would make "
                "fewer than %d steps an epoch",
                rows,
                self._config.global_batch_size,
                objective.MIN_STEPS_PER_EPOCH,
            )

    def _write_result(self) -> None:
        self._clock.begin("exporting")
        preprocessing = self._sources.preprocessing
        network = self._network()
        network.load_state_dict(self._best_weights)
        best: State = {
            "epoch": self._best_epoch,
            "network": self._best_weights,
            "preprocessing": preprocessing.state(),
        }
        write_atomically(self._run.best_checkpoint, serialized(best))
        if isinstance(network, TabularNetwork):
            content = export_program(network, preprocessing)
        else:
            content = export_own(network, preprocessing)
        write_atomically(self._run.program, content)
        self._run.write_result(
            RunResult(
                epochs=tuple(self._history),
                best_epoch=self._best_epoch,
                num_parameters=sum(p.numel() for p in network.parameters()),
                seconds=self._seconds(),
                num_ranks=self._ranks.size,
            )
        )

    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._started
