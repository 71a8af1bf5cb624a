"""How the ranks of a run are started, and how many."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]


REMOVED_FIELDS = ("probe_above_s", "probe_limit_s", "probe_max_ranks", "min_gain")


class LaunchConfig(BaseModel):
    """Number of ranks and threads of a run, and how ranks are started on one host."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    ranks: Auto | Annotated[int, Field(ge=1, le=256)] = Field(
        default=AUTO,
        description="Ranks (processes). `auto`: one, or as many as share a network that the "
        "strategy cuts. Another number makes another model, so no host and no load chooses it.",
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

    @model_validator(mode="before")
    @classmethod
    def _measures_nothing(cls, given: Any) -> Any:
        removed = [name for name in REMOVED_FIELDS if isinstance(given, dict) and name in given]
        if removed:
            raise ValueError(
                f"launch has {', '.join(removed)}, which belonged to a measurement that chose the "
                "number of ranks, and with it the model. Remove them, and set launch.ranks where "
                "one rank is not enough"
            )
        return given
