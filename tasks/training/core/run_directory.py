"""The folder through which the driver and the ranks of one training run talk: files, no pickles.

job.json            driver -> ranks: what to do
checkpoints/        rank 0: states between two steps, kept over attempts
rows/               ranks: decoded rows where they are streamed, kept over attempts
epochs.jsonl        rank 0 -> driver: one line an epoch
telemetry-0000N.json rank N -> driver: what it does and what its time goes into, every few seconds
rank-0000N.json     rank N -> driver: the error that ended it
result.json         rank 0 -> driver: last of all; model.pt2 and best.pt are complete when it exists
s3-access.json      driver -> ranks: address and keys of S3, while they run and where they need it
training.log        driver: every line that a rank printed, all attempts
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from tasks.contracts.base import Contract
from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.telemetry import TrainingTelemetry
from tasks.contracts.training import DistillationTargets, EpochMetrics, StartingPoint
from tasks.kernel.errors import ConfigurationError, TransientError, refused_writes_explained
from tasks.kernel.files import locked, write_atomically
from tasks.kernel.location import AccessName, Location, s3_access
from tasks.kernel.parts import RemoteFile
from tasks.training.config import TrainingConfig

ACCESS_FILE = "s3-access.json"
ACCESS = TypeAdapter(dict[AccessName, str])
# The exit code of a rank that could not even write down its error.
EXIT_REPORT_REFUSED = 74
# What an attempt writes for the driver, which the next one must not take for its own.
LEFTOVERS = (
    "rank-*.json", "telemetry-*.json",
    "result.json", "epochs.jsonl", "elastic.json",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingRequest:
    """What a training is asked to do.

    Args:
        dataset: the validated snapshot.
        splits: which of its rows are for training and for validation.
        config: what to do.
        initial: whose weights to begin with; none: from scratch.
        distillation: whose scores to learn beside the labels; none: nobody's.
        project: folder of the user's own modules; none: those that are installed.
    """

    dataset: ValidatedDataset
    splits: DataSplits
    config: TrainingConfig
    initial: StartingPoint | None = None
    distillation: DistillationTargets | None = None
    project: Path | None = None

    @property
    def columns(self) -> DatasetSchema:
        """Which column of the snapshot is what."""
        return self.dataset.snapshot.columns


class TrainingJob(Contract):
    """What the ranks are asked to do."""

    snapshot_path: Path
    """The whole, or the `PartialCopy` of a remote one."""
    remote: RemoteFile | None = None
    columns: DatasetSchema
    splits: DataSplits
    config: TrainingConfig
    model: str = ""
    """What is trained, for people."""
    initial_path: Path | None = None
    """Checkpoint of the model whose weights the network begins with."""
    initial_columns: DatasetSchema | None = None
    """What that model takes."""
    distillation: DistillationTargets | None = None
    """The teacher whose outputs the snapshot holds beside the labels."""
    project: Path | None = None
    """Folder of the user's own modules, at the same path on every host."""
    num_ranks: PositiveInt = 1
    threads_per_rank: PositiveInt = 1


class RankError(Contract):
    """The error that ended a rank."""

    rank: NonNegativeInt
    kind: str
    message: str
    traceback: str
    secondary: bool
    """True where the rank only suffered from another one's end."""
    time_s: float
    """Unix time; the earliest error is the cause of the others."""


class RunResult(Contract):
    """What rank 0 reports at the end."""

    epochs: tuple[EpochMetrics, ...]
    best_epoch: NonNegativeInt
    num_parameters: PositiveInt
    seconds: float
    """Wall seconds of the ranks' work, earlier attempts included up to their last checkpoint."""
    num_ranks: PositiveInt
    """At the end."""
    telemetry: TrainingTelemetry | None = None
    """Added by the driver."""


class RunDirectory:
    """Names, writers and readers of a run directory's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = path / "rows"
        # The rows of a training that continues the champion's, and those with a teacher's outputs.
        self.snapshot = path / "snapshot.parquet"
        self.distillation_snapshot = path / "distillation.parquet"
        # What became of the ranks of an elastic run, and every line of every rank.
        self.elastic = path / "elastic.json"
        self.log = path / "training.log"
        # Of the best epoch: the exported program, and the plain state dict.
        self.program = path / "model.pt2"
        self.best_checkpoint = path / "best.pt"

    def make(self) -> None:
        """Make the folder, if there is none.

        Raises:
            StorageError: the disk refused.
        """
        with refused_writes_explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def prepare(self, job: TrainingJob) -> None:
        """Make ready for one attempt: keep the checkpoints and the log, drop an old one's reports.

        Raises:
            StorageError: the disk refused a write.
        """
        with refused_writes_explained(self.path):
            for pattern in LEFTOVERS:
                for leftover in self.path.glob(pattern):
                    leftover.unlink()
        self._write("job.json", job)

    def read_job(self) -> TrainingJob:
        """What the driver asks for."""
        return TrainingJob.model_validate_json((self.path / "job.json").read_text())

    @contextmanager
    def access_handed_over(
        self, job: TrainingJob, environment: Mapping[str, str]
    ) -> Iterator[None]:
        """Driver: give the ranks what they need to reach S3, while the context lasts.

        A file of mode 0600, so that no key is in an environment or on a command line; none where
        the job needs no S3. Where the driver has no keys, the ranks ask the machine's role.

        Raises:
            ConfigurationError: there is a key without its secret.
            StorageError: the disk refused the write.
        """
        file = self.path / ACCESS_FILE
        with refused_writes_explained(file):
            file.unlink(missing_ok=True)  # what a killed driver left
        reads_s3 = job.remote is not None and Location(job.remote.url).folder is None
        if not job.config.checkpoints.is_on_s3 and not reads_s3:
            yield
            return
        try:
            write_atomically(file, json.dumps(s3_access(environment)), private=True)
            yield
        finally:
            file.unlink(missing_ok=True)

    def location(self, url: str) -> Location:
        """Rank: a location, reached as the driver has handed over.

        Raises:
            ConfigurationError: it is on S3, and the driver has handed over nothing, or the file is
                not the driver's.
        """
        if Location(url).folder is not None:
            return Location(url)
        file = self.path / ACCESS_FILE
        try:
            return Location(url, ACCESS.validate_json(file.read_bytes()))
        except (FileNotFoundError, ValidationError) as exc:
            seen = "something else" if isinstance(exc, ValidationError) else "not there"
            # Without the cause: its text would show the keys.
            raise ConfigurationError(
                f"{file} is {seen}; expected the address and the keys of the S3 service, which the "
                "driver writes for its ranks while they run. Start the run again"
            ) from None

    def write_error(self, error: RankError) -> None:
        """Report the error that ends a rank.

        Raises:
            StorageError: the disk refused the write.
        """
        self._write(f"rank-{error.rank:05d}.json", error)

    def read_errors(self) -> list[RankError]:
        """Errors of all ranks that reported one, the earliest first."""
        texts = [path.read_text() for path in self.path.glob("rank-*.json")]
        errors = map(RankError.model_validate_json, texts)
        return sorted(errors, key=lambda error: (error.time_s, error.rank))

    def rewrite_epochs(self, epochs: list[EpochMetrics]) -> None:
        """Rank 0: the epochs done so far, one line each."""
        lines = [epoch.model_dump_json() + "\n" for epoch in epochs]
        write_atomically(self.path / "epochs.jsonl", "".join(lines))

    def read_epochs(self) -> list[EpochMetrics]:
        """The epochs done so far; none before the first."""
        try:
            lines = (self.path / "epochs.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [EpochMetrics.model_validate_json(line) for line in lines]

    def write_result(self, result: RunResult) -> None:
        """Rank 0: all is done, and the program and the best checkpoint are complete."""
        self._write("result.json", result)

    def read_result(self) -> RunResult | None:
        """What rank 0 reported at the end; None where it did not."""
        try:
            return RunResult.model_validate_json((self.path / "result.json").read_text())
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: Contract) -> None:
        write_atomically(self.path / name, content.model_dump_json(indent=1))


@contextmanager
def exclusive(path: Path, wait_s: float) -> Iterator[int]:
    """Hold the run directory `path` for one driver; yields the lock's file descriptor.

    A process that inherits the descriptor holds the lock too: so a new driver waits until the ranks
    of a killed one are gone. The lock file is beside the folder. It is removed after a success:
    whoever waits for it finds the result.

    Raises:
        TransientError: another process still holds it after `wait_s` seconds.
        StorageError: the lock file cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")

    def held() -> TransientError:
        return TransientError(
            f"{path.name}: another process is already training this very model (same data, "
            "splits, configuration and code); wait until it has finished and run again, its "
            "result will be reused. Nothing was touched"
        )

    with locked(lock, wait_s=wait_s, held=held) as descriptor:
        yield descriptor
        lock.unlink(missing_ok=True)
