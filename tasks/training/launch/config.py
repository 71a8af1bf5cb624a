"""How many ranks a run has, and with how many threads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title

Auto = Literal["auto"]


class LaunchConfig(BaseModel):
    """Number of ranks and threads of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    ranks: Auto | Annotated[int, Field(ge=1, le=256)] = Field(
        default="auto",
        description="Ranks (processes); `auto` is one. Another number makes another model, so "
        "neither host nor load chooses it.",
    )
    threads_per_rank: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="CPU threads of one rank. `auto`: the host's cores divided by the ranks.",
    )
