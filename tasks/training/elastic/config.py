"""How ranks may come and go while one model is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

LOOPBACK_INTERFACE = "lo"


class ElasticConfig(BaseModel):
    """Hosts, limits and manners of elastic training; logged whole with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    enabled: bool = Field(
        default=False, description="Train on ranks that may be lost and added while it goes on."
    )
    min_ranks: int = Field(
        default=1, ge=1, le=4096, description="With fewer ranks training waits for more."
    )
    max_ranks: int = Field(default=64, ge=1, le=4096, description="More ranks are not started.")

    # Where ranks run
    discovery: Literal["local", "file", "ssh", "script", "kubernetes"] = Field(
        default="local",
        description="Where hosts come from: this machine; a file with a host a line; the same, "
        "without those that do not answer on the SSH port; a program that prints hosts; pods of a "
        "job, asked of the API server.",
    )
    place: str = Field(
        default="",
        description="Path of the file or program; for `kubernetes`, namespace/label selector, such "
        "as ml/training.kubeflow.org/job-name=flights.",
    )
    slots_per_host: int = Field(
        default=2, ge=1, le=256, description="Ranks of a host for which discovery names no number."
    )
    interface: str = Field(
        default=LOOPBACK_INTERFACE,
        pattern=r"^[\w.:@-]{1,15}$",
        description="Network interface that ranks and driver talk over; called so on every host.",
    )

    # How other hosts are reached
    ssh_user: str = Field(
        default="", pattern=r"^[\w.-]*$", description="User on the hosts; empty: this one."
    )
    ssh_port: int = Field(default=22, ge=1, le=65535, description="TCP port of the hosts' sshd.")
    ssh_key_file: Path | None = Field(
        default=None, description="Private key, for this purpose alone."
    )
    ssh_known_hosts_file: Path | None = Field(
        default=None, description="Host keys of all hosts; others are refused."
    )
    remote_python: str = Field(
        default="", description="Python on the hosts; empty: same path as here."
    )
    remote_root: str = Field(
        default="", description="The project's folder on the hosts; empty: same path as here."
    )

    # What a failure costs
    commit_interval_s: float = Field(
        default=0.5, ge=0.05, le=3600, description="Seconds of work that a lost rank may cost all."
    )
    cooldown_min_s: float = Field(
        default=5.0,
        ge=0.1,
        le=300,
        description="Rest of a slot or host after its first failure; each further one doubles "
        "it, up to 5 minutes.",
    )

    # How long to wait
    gloo_timeout_s: int = Field(
        default=10,
        ge=2,
        le=600,
        description="A silent link is taken for cut after this; also the limit for ranks to meet.",
    )
    silence_limit_s: float = Field(
        default=15.0,
        ge=3,
        le=600,
        description="A rank that answers no ping is given up; a remote rank that gets none ends.",
    )
    regroup_timeout_s: float = Field(
        default=60.0,
        ge=5,
        le=7200,
        description="After a loss, how long a rank may go on computing until it notices; above the "
        "longest step.",
    )
    start_timeout_s: float = Field(
        default=180.0, ge=5, le=7200, description="From starting a rank until it can take part."
    )
    gather_timeout_s: float = Field(
        default=600.0, ge=1, le=86400, description="How long too few ranks are waited for."
    )
    notice_s: float = Field(
        default=25.0,
        ge=1,
        le=3600,
        description="After SIGTERM a rank commits, writes a checkpoint and is gone within this.",
    )
    notice_file: Path | None = Field(
        default=None,
        description="A file that appears on a host that will be taken away; like SIGTERM.",
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_ranks > self.max_ranks:
            raise ValueError(
                f"min_ranks={self.min_ranks} is above max_ranks={self.max_ranks}; lower the one or "
                "raise the other"
            )
        return self

    @model_validator(mode="after")
    def _hosts_can_be_reached(self) -> Self:
        if self.discovery == "local":
            return self
        if not self.place:
            raise ValueError(
                f"discovery={self.discovery!r} needs `place`: the path of the file or program, or "
                "namespace/label selector"
            )
        if self.interface == LOOPBACK_INTERFACE:
            raise ValueError(
                f"discovery={self.discovery!r} finds other hosts, which cannot be reached over "
                f"interface={self.interface!r}; name the interface of the training network"
            )
        if self.ssh_key_file is None or self.ssh_known_hosts_file is None:
            raise ValueError(
                f"discovery={self.discovery!r} needs ssh_key_file and ssh_known_hosts_file: hosts "
                "are reached by key, and only those whose host key is known"
            )
        return self
