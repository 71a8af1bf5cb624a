"""Training as the driver sees it: start the ranks, watch them, publish what they made."""

import logging
import os
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

from tasks.contracts.hardware import class_of_run, read_classes
from tasks.contracts.training import TrainedModel
from tasks.kernel.cores import usable_cores
from tasks.kernel.errors import TransientError, refused_writes_explained
from tasks.kernel.files import scratch_folder, write_atomically
from tasks.kernel.guard import GRACE_S
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.metadata.database import held_everywhere
from tasks.training.checkpoints.store import open_store
from tasks.training.config import ONLY_MEASURES, CheckpointConfig, TrainingConfig
from tasks.training.core.run_directory import (
    RunDirectory,
    RunResult,
    TrainingJob,
    TrainingRequest,
    exclusive,
)
from tasks.training.elastic.driver import ElasticDriver
from tasks.training.elastic.process import ElasticSpec
from tasks.training.launch.monitor import OnEpoch, RankLog, RunMonitor, failure_of
from tasks.training.launch.rank_group import RankGroup, local_environments
from tasks.training.launch.rendezvous import CYCLE_VARIABLES, stall_variables
from tasks.training.models.source import source_digest
from tasks.training.telemetry.diagnosis import JobFacts
from tasks.training.telemetry.meters import DeviceMeter
from tasks.training.telemetry.sampler import TelemetrySampler
from tasks.training.telemetry.step_clock import profile_files

LOGGER = logging.getLogger(__name__)
WORKER_MODULE = "tasks.training.launch.worker"
POLL_S = 0.2
# How long the guards of a killed driver may take to end its ranks.
LOCK_WAIT_S = 3 * GRACE_S


def launch_training(
    request: TrainingRequest, store: ArtifactStore, work: Path, on_epoch: OnEpoch | None = None
) -> TrainedModel:
    """Train on the ranks of this host, or of several, and publish the best epoch.

    A run that was cut off goes on from its newest whole checkpoint; one that was finished is not
    repeated.

    Args:
        request: what to train on, how, and what to begin with.
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
    config, sha256 = request.config, request.dataset.snapshot.data.sha256
    begun_with = (request.splits, request.initial, request.distillation)
    code = code_digest(__file__, without=ONLY_MEASURES)
    own = config.own_model
    of_user = () if own is None else (source_digest(own, request.project),)
    inputs = (sha256, request.columns, *begun_with, code, *of_user)
    run = RunDirectory(work / content_key(*inputs, config.computation()))

    def build(folder: StagedFolder) -> TrainedModel:
        job = _planned(request, store, run)
        result = run_job(run, job, lock, on_epoch or (lambda _: None))
        return _published(run, result, request, job, folder)

    shared = run.path.with_suffix(".shared")
    elsewhere = held_everywhere(shared, wait_s=LOCK_WAIT_S) if store.location else nullcontext()
    with elsewhere, exclusive(run.path, LOCK_WAIT_S) as lock:
        run.make()
        # What is measured, and at which prices, makes no other model.
        key = content_key(*inputs, config.model_dump(mode="json", exclude={"telemetry"}))
        model = store.build_once("models", key, TrainedModel, build)
        open_store(_checkpoints(config, store), run.path).clear()
        with refused_writes_explained(run.path):
            shutil.rmtree(run.path, ignore_errors=True)
    return model


def _planned(request: TrainingRequest, store: ArtifactStore, run: RunDirectory) -> TrainingJob:
    """What the ranks are asked to do, and how many they are."""
    snapshot, config, initial = request.dataset.snapshot, request.config, request.initial
    is_derived = request.distillation or (initial and config.replay_share is not None)
    remote = None if is_derived else store.remote(snapshot.data, snapshot.parts)
    path = remote.path if remote else store.path(snapshot.data)
    if initial is not None and config.replay_share is not None:
        from tasks.training.data.derived import write_replayed  # imports pandas

        LOGGER.info("%s", write_replayed(path, run.snapshot, request))
        path = run.snapshot
    if request.distillation is not None:
        from tasks.training.data.derived import write_distillation_targets

        target = run.distillation_snapshot
        LOGGER.info("%s", write_distillation_targets(path, target, request, store))
        path = target
    num_ranks, threads = plan_ranks(config, usable_cores())
    LOGGER.info("%s", in_words(num_ranks, threads))
    return TrainingJob(
        snapshot_path=path,
        remote=remote,
        columns=request.columns,
        splits=request.splits,
        config=config.model_copy(update={"checkpoints": _checkpoints(config, store)}),
        model=snapshot.feature_service,
        initial_path=store.path(initial.checkpoint) if initial else None,
        initial_columns=initial.columns if initial else None,
        distillation=request.distillation,
        project=request.project,
        num_ranks=num_ranks,
        threads_per_rank=threads,
    )


def _checkpoints(config: TrainingConfig, store: ArtifactStore) -> CheckpointConfig:
    """Where checkpoints are; those of a state in a location are there, for any machine to go on."""
    asked = config.checkpoints
    if asked.uri or store.location is None:
        return asked
    return asked.model_copy(update={"uri": f"{store.location.url}/checkpoints"})


def plan_ranks(config: TrainingConfig, num_cores: int) -> tuple[int, int]:
    """Ranks, and threads of each, for a run on a host with so many cores.

    The ranks, and with them what is computed, follow from the configuration alone. Threads that it
    leaves open are the host's cores, divided: they change the last digits of a sum and no more.
    """
    ranks, given = config.num_ranks, config.launch.threads_per_rank
    return ranks, max(1, num_cores // ranks) if given == "auto" else given


def in_words(num_ranks: int, threads: int) -> str:
    """Such as `2 ranks x 1 thread`; recorded with the run."""
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    return f"{ranks} x {threads} thread{'s' * (threads > 1)}"


def run_job(
    run: RunDirectory, job: TrainingJob, lock: int, on_epoch: OnEpoch, module: str = WORKER_MODULE
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
    run.prepare(job)
    config = job.config
    monitor = RunMonitor(run, job, on_epoch)
    on_cuda = config.device == "cuda"
    devices = DeviceMeter(os.environ.get("CUDA_VISIBLE_DEVICES")) if on_cuda else None
    prices = class_of_run(read_classes(), on_gpu=on_cuda)[1]
    sampler = TelemetrySampler(run.path, prices, devices=devices)
    with RankLog(run.log) as log, run.access_handed_over(job, os.environ), sampler:
        log.note(f"--- attempt at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, {job.num_ranks} ranks")
        if config.elastic.enabled:
            _run_elastic(run, job, lock, monitor, log)
        else:
            _run_fixed(run, job, lock, monitor, log, module)
    monitor.report_epochs()
    result = run.read_result()
    if result is None:
        raise TransientError(
            f"all ranks ended without an error and without a result; all lines are in {run.log}"
        )
    facts = JobFacts.of_this_host(config, result.num_ranks, job.threads_per_rank)
    return result.model_copy(update={"telemetry": sampler.diagnosed(facts)})


def _run_fixed(
    run: RunDirectory, job: TrainingJob, lock: int, monitor: RunMonitor, log: RankLog, module: str
) -> None:
    """Run as many ranks as planned, on this host; the end of one is the end of all."""
    threads, stall_s = job.threads_per_rank, job.config.stall_shutdown_s
    # Ranks on torch.distributed meet through a file, whose name must be new for each attempt.
    with (
        scratch_folder("falaj-ranks") as meeting,
        local_environments(job.num_ranks, meeting / "meeting", threads, stall_s) as environments,
        RankGroup(
            module, run.path, [e | _profiling(job.config) for e in environments], lock
        ) as ranks,
    ):
        while ranks.has_output:
            for rank, line in ranks.read_lines(POLL_S):
                log.add(rank, line)
            monitor.check_ranks(ranks)
    if failure := failure_of(run, ranks.exit_codes, ranks.stopped):
        raise failure


def _profiling(config: TrainingConfig) -> dict[str, str]:
    """Environment that a rank needs to be profiled: Horovod records on request, later."""
    is_recorded = config.telemetry.profile and config.strategy.engine == "horovod"
    return {"HOROVOD_TIMELINE": "DYNAMIC"} if is_recorded else {}


def _run_elastic(
    run: RunDirectory, job: TrainingJob, lock: int, monitor: RunMonitor, log: RankLog
) -> None:
    """Run ranks wherever there are hosts, which may come and go."""
    spec = ElasticSpec(
        module=WORKER_MODULE,
        run_path=run.path,
        variables={
            "OMP_NUM_THREADS": str(job.threads_per_rank),
            **CYCLE_VARIABLES,
            **stall_variables(job.config.stall_shutdown_s),
            **_profiling(job.config),
        },
        lock_descriptor=lock,
    )
    with ElasticDriver(spec, job.config.elastic, log.add) as driver:
        report = driver.run(monitor.check)
    write_atomically(run.elastic, report.model_dump_json(indent=1))


def _published(
    run: RunDirectory,
    result: RunResult,
    request: TrainingRequest,
    job: TrainingJob,
    folder: StagedFolder,
) -> TrainedModel:
    kept = (*profile_files(run.path), *run.path.glob(run.elastic.name))
    for file in (run.program, run.best_checkpoint, run.log, *kept):
        shutil.copyfile(file, folder.path / file.name)
    config, telemetry = request.config, result.telemetry
    measured = telemetry is not None and not telemetry.energy.estimated
    return TrainedModel(
        **vars(result),
        program=folder.artifact(run.program.name),
        checkpoint=folder.artifact(run.best_checkpoint.name),
        log=folder.artifact(run.log.name),
        columns=job.columns,
        config=config.model_dump(mode="json"),
        snapshot_sha256=request.dataset.snapshot.data.sha256,
        splits=job.splits,
        strategy=config.strategy.name,
        energy_j=telemetry.energy.joules if telemetry and measured else None,
        launch=in_words(job.num_ranks, job.threads_per_rank),
        kept=tuple(folder.artifact(file.name) for file in kept),
        started_from=request.initial,
    )
