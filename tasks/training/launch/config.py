"""How the ranks of a run are started, and how many."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]


class LaunchConfig(BaseModel):
    """Number of ranks and threads of a run on one host; says nothing of what is computed."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    ranks: Auto | Annotated[int, Field(ge=1, le=256)] = Field(
        default=AUTO,
        description="Ranks (processes). `auto`: one for each GPU; on a CPU host as many as a probe "
        "finds to pay, which is one where the probe is not worth its time.",
    )
    threads_per_rank: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default=AUTO,
        description="CPU threads of one rank. `auto`: the host's cores divided by the ranks.",
    )
    fork_ranks: bool = Field(
        default=True,
        description="Fork ranks from a process that imports everything while data is prepared, so "
        "that they start at once. It holds about 400 MB, which the ranks share.",
    )
    probe_above_s: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description="Seconds of expected training above which the probe is worth its time.",
    )
    probe_limit_s: float = Field(
        default=5.0, gt=0, le=60, description="Seconds that the probe may measure."
    )
    probe_max_ranks: int = Field(
        default=8, ge=1, le=64, description="Most ranks that the probe tries."
    )
    min_gain: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share by which several ranks must be faster than one to be taken.",
    )

    @model_validator(mode="after")
    def _threads_need_ranks(self) -> Self:
        if self.ranks == AUTO and self.threads_per_rank != AUTO:
            raise ValueError(
                f"threads_per_rank={self.threads_per_rank} is given with ranks='auto'; the probe "
                "weighs ranks against threads, so give both or neither"
            )
        return self
