"""How ranks may come and go while one model is trained."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.governance.handling import Address
from tasks.kernel.values import Described

LOOPBACK_INTERFACE = "lo"


class ElasticConfig(Described):
    """Hosts, limits and manners of elastic training; logged whole with the run."""

    enabled: bool = False
    """Train on ranks that may be lost and added while it goes on."""
    min_ranks: int = Field(default=1, ge=1, le=4096)
    """With fewer ranks training waits for more."""
    max_ranks: int = Field(default=64, ge=1, le=4096, description="More ranks are not started.")

    # Where ranks run
    discovery: Literal["local", "ssh", "script", "kubernetes"] = "local"
    """Where hosts come from: this machine; a file with a host a line, without those that do not
    answer on the SSH port; a program that prints hosts; pods of a job, asked of the API server."""
    place: Annotated[str, Address("training rows", prefix="hosts:")] = ""
    """Path of the file or program; for `kubernetes`, namespace/label selector, such as
    ml/training.kubeflow.org/job-name=flights."""
    slots_per_host: int = Field(default=2, ge=1, le=256)
    """Ranks of a host for which discovery names no number."""
    interface: str = Field(default=LOOPBACK_INTERFACE, pattern=r"^[\w.:@-]{1,15}$")
    """Network interface that ranks and driver talk over; called so on every host."""
    encrypted: bool = False
    """Let all traffic between ranks go through a WireGuard tunnel, made for the run on top of the
    interface; always so where encryption is on. Needs CAP_NET_ADMIN on every host."""
    tunnel_port: int = Field(default=0, ge=0, le=65535, description="Its UDP port; 0: any free.")

    # How other hosts are reached
    ssh_user: str = Field(default="", pattern=r"^[\w.-]*$")
    """User on the hosts; empty: this one."""
    ssh_port: int = Field(default=22, ge=1, le=65535, description="TCP port of the hosts' sshd.")
    ssh_key_file: Path | None = None
    """Private key, for this purpose alone."""
    ssh_known_hosts_file: Path | None = None
    """Host keys of all hosts; others are refused."""

    # How long to wait
    gloo_timeout_s: int = Field(default=10, ge=2, le=600)
    """A silent link is taken for cut after this; also the limit for ranks to meet."""
    gather_timeout_s: float = Field(default=600.0, ge=1, le=86400)
    """How long too few ranks are waited for."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_ranks > self.max_ranks:
            raise ValueError(f"min_ranks={self.min_ranks} is above max_ranks={self.max_ranks}")
        needed = {
            "place (path of the file or program)": self.place,
            "place as namespace/label selector": "/" in self.place
            or self.discovery != "kubernetes",
            "an interface that other hosts reach": self.interface != LOOPBACK_INTERFACE,
            "ssh_key_file": self.ssh_key_file,
            "ssh_known_hosts_file (hosts that are not in it are refused)": (
                self.ssh_known_hosts_file
            ),
        }
        missing = [name for name, given in needed.items() if not given]
        if self.discovery != "local" and missing:
            raise ValueError(f"discovery={self.discovery!r} needs {', '.join(missing)}")
        return self
