"""What a rank on torch.distributed must find in its environment.

The names are those of torchrun, so that ranks may also be started by it. On one host the ranks meet
through a file: torch's own TCP store would listen on every interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tasks.kernel.errors import ConfigurationError

LOOPBACK_INTERFACE = "lo"
STORE_FILE = "TORCH_STORE_FILE"
TIMEOUT = "TORCH_EXCHANGE_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 120


def local_torch_variables(
    rank: int, num_ranks: int, store_file: Path, timeout_s: int = DEFAULT_TIMEOUT_S
) -> dict[str, str]:
    """Environment that tells one rank of a single host who it is and where to meet the others.

    Args:
        rank: number of the rank.
        num_ranks: ranks of the job, all on this host.
        store_file: absent; a new name for each attempt, the same for all its ranks. To be removed
            by the caller after the attempt.
        timeout_s: how long a rank waits for another in one exchange before it gives up.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_FILE: str(store_file),
        TIMEOUT: str(timeout_s),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }


@dataclass(frozen=True)
class TorchEnvironment:
    """Who a rank is, and where it meets the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    meeting_point: str
    """For `torch.distributed.init_process_group(init_method=...)`."""
    timeout_s: int

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Self:
        """Read a rank's environment.

        Raises:
            ConfigurationError: a variable is absent or no number.
        """
        try:
            return cls(
                rank=int(variables["RANK"]),
                size=int(variables["WORLD_SIZE"]),
                local_rank=int(variables["LOCAL_RANK"]),
                local_size=int(variables["LOCAL_WORLD_SIZE"]),
                meeting_point=_meeting_point(variables),
                timeout_s=int(variables.get(TIMEOUT, DEFAULT_TIMEOUT_S)),
            )
        except (KeyError, ValueError) as exc:
            raise ConfigurationError(
                f"a rank on torch.distributed needs RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE "
                f"and {STORE_FILE} (or MASTER_ADDR and MASTER_PORT) in its environment, as numbers "
                f"where they are numbers; seen: {exc!r}. Start it through the launcher or torchrun"
            ) from exc


def _meeting_point(variables: Mapping[str, str]) -> str:
    if STORE_FILE in variables:
        return Path(variables[STORE_FILE]).as_uri()
    return f"tcp://{variables['MASTER_ADDR']}:{int(variables['MASTER_PORT'])}"
