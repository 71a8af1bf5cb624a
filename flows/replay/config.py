"""What of a use case's history is replayed, and with which policies."""

from datetime import datetime
from typing import Self, get_args

from pydantic import Field, model_validator

from tasks.contracts.replay import PolicyName
from tasks.kernel.values import Described

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class ReplayConfig(Described):
    """One replay of the history that a use case holds."""

    policies: tuple[PolicyName, ...] = POLICIES
    """Policies to walk; `never`, `monthly`, `controller` and `oracle` are always among them, since
    the others are compared with these."""
    start: datetime | None = None
    """First day of the walk; none: when a quarter of the history is over."""
    held_out_from: datetime | None = None
    """Days before it may choose bounds, days from it on judge; none: the middle of the history."""
    faults: str = Field(default="", max_length=2000, description="Faults to inject, one by one.")
    permuted: int = Field(default=0, ge=0, le=100)
    """Histories with their days in a random order."""
    tune: bool = Field(default=False, description="Propose bounds of the controller.")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Of the order of permuted days.")

    @model_validator(mode="after")
    def _compares_with_the_others(self) -> Self:
        wanted = {*self.policies, "never", "monthly", "controller", "oracle"}
        object.__setattr__(self, "policies", tuple(p for p in POLICIES if p in wanted))
        return self
