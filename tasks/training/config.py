"""What one training run is asked to do, what is measured of it, and where its checkpoints go."""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from tasks.contracts.base import retired
from tasks.governance.handling import Address
from tasks.kernel.values import Described
from tasks.training.elastic.config import ElasticConfig
from tasks.training.models.config import AVERAGE, BOOSTING, NETWORK, BoostingConfig, checked_model
from tasks.training.strategies.config import StrategyConfig

# Folders below each other; none of them is `.` or `..`, and neither a query nor a fragment follows.
FOLDERS = r"(?:/(?!\.{1,2}(?:/|$))[^/?#\0]*)*"
LOCAL_URI = re.compile(rf"file://({FOLDERS})")
S3_URI = re.compile(rf"s3://[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]{FOLDERS}")


class CheckpointConfig(Described):
    """Checkpoints of one training run; how it is carried out, not what it computes."""

    uri: Annotated[str, Address("checkpoints")] = Field(default="", max_length=1024)
    """Folder of the checkpoints of all runs: file:///folder or
    s3://bucket/prefix; each run has its own below. Empty: the run directory.
    Ranks on several hosts need a place that all of them reach."""
    every_s: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds between checkpoints within an epoch; there is one after each epoch in any case. What
    is lost with all ranks is at most this, and the time of a write."""

    @model_validator(mode="after")
    def _uri_names_a_location(self) -> Self:
        if self.uri and not (self.local_folder or self.is_on_s3):
            # Without the URI: what stands before an @ may be a password.
            raise ValueError(
                "uri is no location for checkpoints; expected file:///folder or "
                "s3://bucket/prefix, without user, query or '..', or nothing"
            )
        return self

    @property
    def local_folder(self) -> str:
        """Absolute folder that `uri` names; empty where it names none."""
        match = LOCAL_URI.fullmatch(self.uri)
        return unquote(match[1]).rstrip("/") if match else ""

    @property
    def is_on_s3(self) -> bool:
        """True where `uri` names a prefix of a bucket."""
        return S3_URI.fullmatch(self.uri) is not None


class TelemetryConfig(Described):
    """Profile of one training run; changes nothing that it computes. Prices: `hardware.yaml`."""

    profile: bool = False
    """Record five steps of every rank with torch.profiler, and their collectives with Horovod's
    timeline; the traces are kept with the model."""
    _retired = retired("watts_per_core", "price_per_kwh", "price_per_node_hour", "currency")


# Code that measures a training and changes nothing of it: no part of a model's key.
ONLY_MEASURES = ("tasks.training.telemetry",)
# Fields that say how a run is carried out, not what it computes: a run that was cut off may go on
# from its checkpoints with other values of these, for example on fewer ranks.
EXECUTION_FIELDS = frozenset(
    {
        "launch",
        "elastic",
        "checkpoints",
        "telemetry",
        "device",
        "stall_warning_s",  # of earlier releases
        "stall_shutdown_s",
        "progress_timeout_s",
        "time_limit_s",
    }
)


PIECE_ROWS = 64
"""Neighbouring rows that are read together: pieces come in random order, and many of them are
shuffled row by row. With 64 batches vary 3 % more than by chance where every day has a rate of its
own, with 256 25 %; larger ones read faster from a disk that seeks."""


class ReadingConfig(Described):
    """How rows are shuffled; they are decoded into files, and read from there in each epoch."""

    shuffle_rows: int = Field(default=1 << 18, ge=PIECE_ROWS, le=1 << 28)
    """Rows of all shards that are shuffled with each other at a time. All rows of an epoch are,
    where there are fewer. A row of one number takes 4 bytes."""

    _retired = retired("mode")


Auto = Literal["auto"]


class LaunchConfig(Described):
    """Number of ranks and threads of a run."""

    ranks: Auto | Annotated[int, Field(ge=1, le=256)] = "auto"
    """Ranks (processes); `auto` is one. Another number makes another model, so neither host nor
    load chooses it."""
    threads_per_rank: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """CPU threads of one rank. `auto`: the host's cores divided by the ranks."""


class TrainingConfig(Described):
    """Model, optimisation and ranks of one training run; logged whole with the run."""

    # Model
    model: Annotated[str, AfterValidator(checked_model)] = NETWORK
    """`network`; `gradient-boosting`; `average`: the mean of both; or `package:function`, which
    gives a PyTorch module of your own."""
    boosting: BoostingConfig = BoostingConfig()
    """How boosted trees are grown, where there are any."""

    # Ranks and data
    launch: LaunchConfig = LaunchConfig()
    """How many ranks, and how they are started."""
    strategy: StrategyConfig = StrategyConfig()
    """How ranks share the work, and in which precision."""
    elastic: ElasticConfig = ElasticConfig()
    """Ranks that come and go, on one host or several."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """Where training states are kept, and how often."""
    reading: ReadingConfig = Field(default=ReadingConfig(), description="How rows are shuffled.")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="What is measured.")
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the network runs. `cuda` without a device is an error."""
    num_shards: int = Field(default=8, ge=1, le=4096)
    """Virtual shards of the data. Every step takes equally many rows of each, so results do not
    depend on the number of ranks; more ranks than shards have nothing to do."""
    global_batch_size: int = Field(default=2048, ge=1, le=1 << 20)
    """Rows per step over all ranks; a multiple of num_shards. Lowered, with a line in the log,
    where the training rows would make fewer than 8 steps an epoch."""

    # Where it begins
    start: Literal["scratch", "champion"] = "scratch"
    """`champion`: begin with the weights of the model in service, as far as they mean the same;
    without a champion from scratch, with a line in the log."""
    replay_share: float | None = Field(default=None, ge=0, lt=1)
    """Train on rows newer than the champion's training window alone, and on so many older ones that
    they are this share of all; none: on all rows. For start='champion'."""

    # Optimisation
    max_epochs: int = Field(default=8, ge=1, le=1000, description="Passes over the training rows.")
    patience: PositiveInt = Field(default=3, le=1000)
    """Epochs without a better validation AUC (or R2) to the end."""
    average_decay: float = Field(default=0.7, ge=0, lt=1)
    """After each epoch the mean of the weights at the ends of all epochs is validated, kept and
    served, in which an epoch counts so many times the next one. Training itself goes on without it.
    0: the epoch's own weights."""
    learning_rate: float = Field(default=4e-3, gt=0, le=1)
    """Peak of the one-cycle schedule."""
    weight_decay: float = Field(default=0.2, ge=0, le=10)
    """AdamW decay of weight matrices, per unit of rate."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of everything random.")

    # Network
    hidden_sizes: tuple[PositiveInt, ...] = Field(default=(256, 128), min_length=1, max_length=8)
    """Units of each hidden layer."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """Share of hidden units dropped in training."""
    category_dropout: float = Field(default=0.05, ge=0, lt=1)
    """Share of categories shown as unknown in training, so that the network knows what to do with
    one it has never seen."""
    max_embedding_size: int = Field(default=16, ge=1, le=512)
    """Upper bound of a category column's embedding, which has the rounded-up square root of its
    number of categories."""
    num_bins: int = Field(default=6, ge=2, le=256)
    """Quantile bins of each number's encoding."""
    min_category_rows: PositiveInt = Field(default=20, le=1_000_000)
    """Rarer categories in the training rows are unknown."""

    # Limits, in seconds
    stall_shutdown_s: int = Field(default=90, ge=3, le=7200)
    """A rank missing from a collective ends the run; it is reported after a third."""
    progress_timeout_s: int = Field(default=180, ge=5, le=7200)
    """No progress on any rank ends the run."""
    time_limit_s: int = Field(default=3600, ge=10, le=7 * 86400)
    """Wall seconds of one attempt."""

    @model_validator(mode="before")
    @classmethod
    def _networks_are_of_pytorch(cls, given: Any) -> Any:
        """Earlier releases named the framework, and wrote it into registered versions."""
        if isinstance(given, dict) and given.get("network") == "torch":
            return {name: value for name, value in given.items() if name != "network"}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.global_batch_size % self.num_shards:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} does not divide over num_shards="
                f"{self.num_shards}; use a multiple of {self.num_shards}"
            )
        if self.replay_share is not None and self.start != "champion":
            raise ValueError(
                "replay_share trains on what is new since the champion, so it needs "
                "start='champion'; a network from scratch has nothing to build on"
            )
        if self.start == "champion" and self.model != NETWORK:
            raise ValueError(
                f"start='champion' moves a network's weights by what they mean, and model="
                f"{self.model!r} has none that are known; set start='scratch'"
            )
        if self.elastic.enabled and self.strategy.name != "horovod":
            raise ValueError(
                f"elastic training needs strategy.name='horovod', not {self.strategy.name!r}: each "
                "rank must hold the whole network to go on without another"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of a run that is not elastic."""
        return 1 if self.launch.ranks == "auto" else self.launch.ranks

    @property
    def has_network(self) -> bool:
        """False where trees alone are grown: in this process, without ranks."""
        return self.model != BOOSTING

    @property
    def has_trees(self) -> bool:
        """Whether boosted trees are grown."""
        return self.model in (BOOSTING, AVERAGE)

    @property
    def own_model(self) -> str | None:
        """`package:function` of a module of the user's; None for a model of ours."""
        return self.model if ":" in self.model else None

    @property
    def judged_epochs(self) -> int:
        """Most epochs after which a trial may be ended early; trees come all at once."""
        return self.max_epochs if self.has_network else 1

    def computation(self) -> dict[str, object]:
        """The fields that decide what is computed: all but those that say how it is carried out."""
        return self.model_dump(mode="json", exclude=set(EXECUTION_FIELDS))


def model_trained(given: Any) -> Any:
    """A use case whose `model`, at its top, is the model of its training; for a validator.

    Raises:
        ValueError: its training names another one.
    """
    if not isinstance(given, dict) or "model" not in given:
        return given
    rest = {name: value for name, value in given.items() if name != "model"}
    training = rest.get("training") or {}
    if isinstance(training, TrainingConfig):
        training = training.model_dump()
    if not isinstance(training, dict):  # which the field itself refuses
        return rest
    if training.get("model", given["model"]) != given["model"]:
        raise ValueError(
            f"model is {given['model']!r}, and training.model {training['model']!r}; write one"
        )
    return {**rest, "training": {**training, "model": given["model"]}}
