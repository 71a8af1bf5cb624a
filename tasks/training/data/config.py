"""How training rows are read."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title

ReadingMode = Literal["memory", "stream"]
PIECE_ROWS = 64
"""Neighbouring rows that are read together: pieces come in random order, and many of them are
shuffled row by row. With 64 batches vary 3 % more than by chance where every day has a rate of its
own, with 256 25 %; larger ones read faster from a disk that seeks."""


class ReadingConfig(BaseModel):
    """Where rows are held while training, and how they are shuffled."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    mode: Literal["auto", "memory", "stream"] = Field(
        default="auto",
        description="`memory` holds a rank's rows in memory; `stream` decodes them once into files "
        "in the run directory and reads those in every epoch; `auto` takes `memory` where every "
        "rank's rows fit into half of its part of the free memory. Batches are the same.",
    )
    shuffle_rows: int = Field(
        default=1 << 18,
        ge=PIECE_ROWS,
        le=1 << 28,
        description="Rows of all shards that are shuffled with each other at a time. All rows of "
        "an epoch are, where there are fewer. A row of one number takes 4 bytes.",
    )

    def computation(self) -> dict[str, object]:
        """The fields that decide which rows a step holds: both modes give equal batches."""
        return self.model_dump(mode="json", exclude={"mode"})
