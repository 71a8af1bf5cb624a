"""What one training run is asked to do."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

# Fields that say how a run is carried out, not what it computes: a run that was cut off may go on
# from its checkpoints with other values of these, for example on fewer ranks.
EXECUTION_FIELDS = frozenset(
    {
        "num_ranks",
        "threads_per_rank",
        "device",
        "stall_warning_s",
        "stall_shutdown_s",
        "progress_timeout_s",
        "time_limit_s",
    }
)


class TrainingConfig(BaseModel):
    """Model, optimisation and ranks of one training run; logged whole with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Ranks and data
    strategy: Literal["horovod"] = Field(
        default="horovod", description="Engine that exchanges gradients between ranks."
    )
    num_ranks: int = Field(
        default=2, ge=1, le=256, description="Horovod ranks (processes); on GPUs, one per GPU."
    )
    threads_per_rank: int = Field(default=1, ge=1, le=256, description="CPU threads of one rank.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="Where the network runs. `cuda` without a device is an error."
    )
    num_shards: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Virtual shards of the data. Every step takes equally many rows of each, so "
        "results do not depend on num_ranks, which must divide it.",
    )
    global_batch_size: int = Field(
        default=2048,
        ge=1,
        le=1 << 20,
        description="Rows per step over all ranks; a multiple of num_shards. Lowered, with a line "
        "in the log, where the training rows would make fewer than 8 steps an epoch.",
    )

    # Optimisation
    max_epochs: int = Field(default=8, ge=1, le=1000, description="Passes over the training rows.")
    patience: PositiveInt = Field(
        default=3, le=1000, description="Epochs without a better validation AUC before stopping."
    )
    learning_rate: float = Field(
        default=4e-3, gt=0, le=1, description="Peak of the one-cycle schedule."
    )
    weight_decay: float = Field(
        default=0.2, ge=0, le=10, description="AdamW decay of weight matrices, per unit of rate."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of everything random.")

    # Network
    hidden_sizes: tuple[PositiveInt, ...] = Field(
        default=(256, 128), min_length=1, max_length=8, description="Units of each hidden layer."
    )
    dropout: float = Field(
        default=0.3, ge=0, lt=1, description="Share of hidden units dropped in training."
    )
    category_dropout: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of categories shown as unknown in training, so that the network knows "
        "what to do with one it has never seen.",
    )
    max_embedding_size: int = Field(
        default=16,
        ge=1,
        le=512,
        description="Upper bound of a category column's embedding, which has the rounded-up square "
        "root of its number of categories.",
    )
    num_bins: int = Field(
        default=6, ge=2, le=256, description="Quantile bins of each number's encoding."
    )
    min_category_rows: PositiveInt = Field(
        default=20, le=1_000_000, description="Rarer categories in the training rows are unknown."
    )

    # Limits, in seconds
    stall_warning_s: int = Field(
        default=30, ge=1, le=3600, description="A rank missing from an exchange is reported."
    )
    stall_shutdown_s: int = Field(
        default=90, ge=2, le=7200, description="A rank missing from an exchange ends the run."
    )
    progress_timeout_s: int = Field(
        default=180, ge=5, le=7200, description="No progress on any rank ends the run."
    )
    time_limit_s: int = Field(
        default=3600, ge=10, le=7 * 86400, description="Wall seconds of one attempt."
    )

    @model_validator(mode="after")
    def _splits_evenly(self) -> Self:
        for name, value, over, count in (
            ("num_shards", self.num_shards, "num_ranks", self.num_ranks),
            ("global_batch_size", self.global_batch_size, "num_shards", self.num_shards),
        ):
            if value % count:
                raise ValueError(
                    f"{name}={value} does not divide over {over}={count}; use a multiple of {count}"
                )
        return self

    @model_validator(mode="after")
    def _limits_in_order(self) -> Self:
        if self.stall_shutdown_s <= self.stall_warning_s:
            raise ValueError(
                f"stall_shutdown_s={self.stall_shutdown_s} is not above "
                f"stall_warning_s={self.stall_warning_s}; a stall is reported before it ends a run"
            )
        return self

    def computation(self) -> dict[str, object]:
        """The fields that decide what is computed: all but those that say how it is carried out."""
        return self.model_dump(mode="json", exclude=set(EXECUTION_FIELDS))
