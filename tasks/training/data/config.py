"""How training rows are read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title, retired

PIECE_ROWS = 64
"""Neighbouring rows that are read together: pieces come in random order, and many of them are
shuffled row by row. With 64 batches vary 3 % more than by chance where every day has a rate of its
own, with 256 25 %; larger ones read faster from a disk that seeks."""


class ReadingConfig(BaseModel):
    """How rows are shuffled; they are decoded into files, and read from there in each epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    shuffle_rows: int = Field(
        default=1 << 18,
        ge=PIECE_ROWS,
        le=1 << 28,
        description="Rows of all shards that are shuffled with each other at a time. All rows of "
        "an epoch are, where there are fewer. A row of one number takes 4 bytes.",
    )

    _retired = retired("mode")
