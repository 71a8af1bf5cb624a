"""Training as the driver sees it: start the ranks, watch them, publish what they made."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tasks.contracts import DataSplits, EpochMetrics, TrainedModel, ValidatedDataset
from tasks.errors import TrainingError, TransientError, refused_writes_explained
from tasks.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.training.config import TrainingConfig
from tasks.training.launch.outcome import failure_of
from tasks.training.launch.rank_group import GRACE_S, RankGroup, RankSpec
from tasks.training.launch.rank_log import RankLog
from tasks.training.run_directory import RunDirectory, RunResult, TrainingJob, exclusive

LOGGER = logging.getLogger(__name__)
WORKER_MODULE = "tasks.training.worker"
POLL_S = 0.2
# After a first rank has failed, how long the others may take to notice and report.
SETTLE_S = 5.0
# How long the guards of a killed driver may take to end its ranks.
LOCK_WAIT_S = 3 * GRACE_S

OnEpoch = Callable[[EpochMetrics], None]


def launch_training(
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: TrainingConfig,
    store: ArtifactStore,
    work: Path,
    on_epoch: OnEpoch | None = None,
) -> TrainedModel:
    """Train on `config.num_ranks` local ranks and publish the best epoch.

    A run that was cut off goes on from its newest whole checkpoint; one that was finished is not
    repeated.

    Args:
        dataset: the validated snapshot.
        splits: which of its rows are for training and for validation.
        config: what to do.
        store: where the snapshot is and the model goes.
        work: folder of the run directories; one is removed when its model is published.
        on_epoch: called in this thread after each epoch, also for those of earlier attempts.

    Raises:
        TransientError: a rank was lost, stuck, or another process trains the same model.
        DataContractError: the snapshot is not what was promised; the sentence names the rank.
        ConfigurationError: the device that is asked for is not there.
        TrainingError: training failed in a way that will repeat, or took too long.
        ArtifactError: the snapshot is absent or damaged.
        StorageError: the disk refused a write.
    """
    snapshot = dataset.snapshot
    inputs = (snapshot.data.sha256, snapshot.columns, splits, code_digest(__file__))
    run_path = work / content_key(*inputs, config.computation())

    def build(folder: StagedFolder) -> TrainedModel:
        job = TrainingJob(
            snapshot_path=store.path(snapshot.data),
            columns=snapshot.columns,
            splits=splits,
            config=config,
        )
        result = run_job(RunDirectory(run_path), job, lock, on_epoch or (lambda _: None))
        return _publish(RunDirectory(run_path), result, dataset, job, folder)

    with exclusive(run_path, LOCK_WAIT_S) as lock:
        model = store.build_once("models", content_key(*inputs, config), TrainedModel, build)
        with refused_writes_explained(run_path):
            shutil.rmtree(run_path, ignore_errors=True)
    return model


def run_job(
    run: RunDirectory,
    job: TrainingJob,
    lock: int,
    on_epoch: OnEpoch,
    module: str = WORKER_MODULE,
) -> RunResult:
    """Start all ranks of a job, watch them to the end, and return what rank 0 reported.

    Args:
        run: the run directory; checkpoints in it are gone on from.
        job: what to do.
        lock: descriptor of the lock on the run directory, see `run_directory.exclusive`.
        on_epoch: called after each epoch.
        module: what each rank runs.

    Raises:
        TransientError, DataContractError, ConfigurationError, TrainingError, StorageError: as
            `launch_training`.
    """
    config = job.config
    run.prepare(job)
    spec = RankSpec(
        module=module,
        run_path=run.path,
        num_ranks=config.num_ranks,
        threads=config.threads_per_rank,
        stall_warning_s=config.stall_warning_s,
        stall_shutdown_s=config.stall_shutdown_s,
        lock_descriptor=lock,
    )
    with RankLog(run.log) as log:
        log.note(f"--- attempt at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, {config.num_ranks} ranks")
        with RankGroup(spec) as ranks:
            watch = Watch(run, config, ranks, on_epoch)
            while ranks.has_output:
                for rank, line in ranks.read_lines(POLL_S):
                    log.add(rank, line)
                watch.look()
        watch.report_epochs()
    if failure := failure_of(run, ranks.exit_codes, ranks.stopped):
        raise failure
    result = run.read_result()
    if result is None:
        raise TransientError(
            f"all ranks ended without an error and without a result; all lines are in {run.log}"
        )
    return result


class Watch:
    """What the driver looks after while the ranks run: epochs, failures and deadlines."""

    def __init__(
        self, run: RunDirectory, config: TrainingConfig, ranks: RankGroup, on_epoch: OnEpoch
    ) -> None:
        self._run = run
        self._config = config
        self._ranks = ranks
        self._on_epoch = on_epoch
        self._num_epochs = 0
        self._started = time.monotonic()
        self._failed_at: float | None = None
        self._progress_at = self._started
        self._last_said = dict.fromkeys(range(config.num_ranks), "nothing yet")

    def look(self) -> None:
        """Pass on new epochs, stop the ranks that a failed one has left behind, keep deadlines.

        Raises:
            TransientError: no rank has made progress for too long.
            TrainingError: the attempt takes too long.
        """
        now = time.monotonic()
        self.report_epochs()
        exit_codes = self._ranks.exit_codes
        if any(exit_codes.values()):
            self._failed_at = self._failed_at or now
            if now - self._failed_at > SETTLE_S:
                self._ranks.stop()
            return
        self._check_progress(now)
        if now - self._started > self._config.time_limit_s:
            raise TrainingError(
                f"training did not end within time_limit_s={self._config.time_limit_s}; it has "
                f"done {self._num_epochs} epoch(s). Raise the limit and run again: it goes on from "
                "its newest checkpoint"
            )

    def report_epochs(self) -> None:
        """Pass on the epochs that rank 0 has finished since the last call."""
        epochs = self._run.read_epochs()
        for metrics in epochs[self._num_epochs :]:
            self._on_epoch(metrics)
        self._num_epochs = max(self._num_epochs, len(epochs))

    def _check_progress(self, now: float) -> None:
        """A rank that waits for another says nothing either: so all must be silent."""
        for rank, text in self._last_said.items():
            progress = self._run.read_progress(rank)
            if progress is not None and str(progress) != text:
                self._last_said[rank] = str(progress)
                self._progress_at = now
        silence_s = now - self._progress_at
        if silence_s > self._config.progress_timeout_s:
            last = "; ".join(f"rank {rank}: {text}" for rank, text in self._last_said.items())
            raise TransientError(
                f"no rank has made progress for {silence_s:.0f} s (limit progress_timeout_s="
                f"{self._config.progress_timeout_s}); last seen: {last}. All ranks were stopped. A "
                f"new attempt goes on from the newest checkpoint; all lines are in {self._run.log}"
            )


def _publish(
    run: RunDirectory,
    result: RunResult,
    dataset: ValidatedDataset,
    job: TrainingJob,
    folder: StagedFolder,
) -> TrainedModel:
    for file in (run.program, run.best_checkpoint, run.log):
        shutil.copyfile(file, folder.path / file.name)
    config = job.config
    return TrainedModel(
        program=folder.artifact(run.program.name),
        checkpoint=folder.artifact(run.best_checkpoint.name),
        log=folder.artifact(run.log.name),
        columns=job.columns,
        config=config.model_dump(mode="json"),
        snapshot_sha256=dataset.snapshot.data.sha256,
        splits=job.splits,
        epochs=result.epochs,
        best_epoch=result.best_epoch,
        num_ranks=config.num_ranks,
        strategy=config.strategy,
        num_parameters=result.num_parameters,
        seconds=result.seconds,
    )
