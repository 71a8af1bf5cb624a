"""How training rows are read."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

ReadingMode = Literal["memory", "stream"]

# Fields that say how rows are read, not which rows a step holds: both modes give equal batches.
EXECUTION_FIELDS = frozenset({"mode", "memory_share", "prefetch_pools", "reader_threads"})


class ReadingConfig(BaseModel):
    """Where rows are held while training, how far ahead they are read, how they are shuffled."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    mode: Literal["auto", "memory", "stream"] = Field(
        default="auto",
        description="`memory` holds a rank's rows in memory; `stream` decodes them once into files "
        "in the run directory and reads those in every epoch; `auto` takes `memory` where every "
        "rank's rows fit into memory_share of its part of the free memory. Batches are the same.",
    )
    memory_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the host's free memory that rows of all its ranks may take (`auto`).",
    )
    shuffle_rows: int = Field(
        default=1 << 18,
        ge=1,
        le=1 << 28,
        description="Rows of all shards that are shuffled with each other at a time. All rows of "
        "an epoch are, where there are fewer. A row of one number takes 4 bytes.",
    )
    piece_rows: int = Field(
        default=64,
        ge=1,
        le=1 << 20,
        description="Neighbouring rows that are read together: pieces come in random order, and "
        "shuffle_rows / piece_rows of them are shuffled row by row. Smaller mixes better (64: "
        "batches vary 3 % more than by chance where every day has a rate of its own, 256: 25 %), "
        "larger reads faster from a disk that seeks.",
    )
    prefetch_pools: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Shuffled pools of each shard that are read ahead (`stream`): at most "
        "1 + prefetch_pools times shuffle_rows rows over all ranks.",
    )
    reader_threads: Annotated[int, Field(ge=0, le=64)] | None = Field(
        default=None,
        description="Threads of each rank that read ahead (`stream`). 0: none, only the kernel "
        "reads ahead; on a rank that computes on a core of its own a thread has no other core to "
        "run on. Unset: 0 on CPUs, 1 on GPUs, where the rank's core is free while the GPU works.",
    )

    @model_validator(mode="after")
    def _pool_holds_pieces(self) -> Self:
        if self.shuffle_rows < self.piece_rows:
            raise ValueError(
                f"shuffle_rows={self.shuffle_rows} is below piece_rows={self.piece_rows}; rows are "
                "shuffled over many pieces, so use a multiple of it"
            )
        return self

    def computation(self) -> dict[str, object]:
        """The fields that decide which rows a step holds."""
        return self.model_dump(mode="json", exclude=set(EXECUTION_FIELDS))
