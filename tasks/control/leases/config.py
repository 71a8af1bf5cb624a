"""What can be asked for, and by which rules it is given."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

URGENT, LOWEST = 1, 10


class LeaseRequest(BaseModel):
    """Devices of one host that a piece of work needs at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    cores: int = Field(default=0, ge=0, le=4096, description="CPU cores, each for it alone.")
    gpus: int = Field(default=0, ge=0, le=64, description="GPUs, or slices of GPUs.")
    mig_profile: str | None = Field(
        default=None,
        pattern=r"^[0-9]+(c\.[0-9]+)?g\.[0-9]+gb([+.-][a-z.]+)?$",
        description="Slices of this profile, such as `1g.18gb`, instead of whole GPUs.",
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.cores and not self.gpus:
            raise ValueError("cores=0 and gpus=0 ask for nothing; ask for one of them at least")
        if not self.gpus and self.mig_profile:
            raise ValueError("mig_profile says which GPUs, but gpus=0; set gpus")
        if self.gpus > 1 and self.mig_profile:
            raise ValueError(
                f"gpus={self.gpus} slices {self.mig_profile}: CUDA shows a program one slice at a "
                "time; ask for one larger slice, or for a lease for each program"
            )
        return self

    def __str__(self) -> str:
        wanted = [f"{self.cores} core(s)"] if self.cores else []
        if self.gpus:
            kind = f"slice(s) {self.mig_profile}" if self.mig_profile else "GPU(s)"
            wanted.append(f"{self.gpus} {kind}")
        return " and ".join(wanted)


class StageLease(BaseModel):
    """The devices that a stage holds while it works, and how it waits for them."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    enabled: bool = Field(
        default=True,
        description="Hold a lease. Not needed where something else gives each run devices of its "
        "own, as Kubernetes does.",
    )
    request: LeaseRequest | None = Field(
        default=None,
        description="What to hold; none: all cores that the process may use and, for training on "
        "`cuda`, all whole GPUs. Ask for less to let several trainings share a host.",
    )
    priority: int = Field(
        default=3, ge=URGENT, le=LOWEST, description="Place in the line; 1 is the most urgent."
    )
    wait_s: float | None = Field(
        default=None,
        ge=0,
        le=2592000,
        description="Longest wait in seconds; none: as long as it takes.",
    )
