from __future__ import annotations

from pathlib import Path

import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.torch_environment import TorchEnvironment, local_torch_variables


def test_a_rank_reads_what_the_launcher_wrote() -> None:
    variables = local_torch_variables(1, 3, Path("/some where/store"), timeout_s=7)
    assert TorchEnvironment.of(variables) == TorchEnvironment(
        rank=1,
        size=3,
        local_rank=1,
        local_size=3,
        meeting_point="file:///some%20where/store",
        timeout_s=7,
    )


def test_ranks_of_one_host_use_the_loopback_interface_alone() -> None:
    variables = local_torch_variables(0, 2, Path("/store"))
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert "MASTER_ADDR" not in variables


def test_ranks_of_several_hosts_meet_as_torchrun_says() -> None:
    variables = {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.5",
        "MASTER_PORT": "2900",
    }
    environment = TorchEnvironment.of(variables)
    assert environment.meeting_point == "tcp://10.0.0.5:2900"
    assert (environment.rank, environment.local_rank) == (4, 0)


@pytest.mark.parametrize("change", [{"RANK": "first"}, {"TORCH_EXCHANGE_TIMEOUT_S": "soon"}])
def test_what_is_no_number_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="Start it through the launcher or torchrun"):
        TorchEnvironment.of({**local_torch_variables(0, 1, Path("/store")), **change})


def test_an_environment_without_a_meeting_point_is_refused() -> None:
    variables = local_torch_variables(0, 1, Path("/store"))
    del variables["TORCH_STORE_FILE"]
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        TorchEnvironment.of(variables)
