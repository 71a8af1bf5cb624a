from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tasks.kernel.errors import ConfigurationError
from tasks.training.launch.rendezvous import local_torch_variables
from tasks.training.strategies.communicators import TorchCommunicator, join
from tasks.training.strategies.config import StrategyConfig


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch is called with."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **given: seen.update(given))
    return seen


@pytest.mark.parametrize("name", ["horovod", "ddp"])
def test_a_process_that_is_no_rank_does_not_train_alone_in_silence(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("HOROVOD_HOSTNAME", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigurationError, match="Start it through the launcher or"):
        join(StrategyConfig.model_validate({"name": name}), "cpu")


def test_a_rank_reads_what_the_launcher_wrote(joined: dict[str, Any]) -> None:
    variables = local_torch_variables(1, 3, Path("/some where/store"), timeout_s=7)
    ranks = TorchCommunicator.join(variables, "cpu")
    assert (ranks.local_rank, ranks.local_size) == (1, 3)
    assert (joined["rank"], joined["world_size"]) == (1, 3)
    assert joined["init_method"] == "file:///some%20where/store"
    assert joined["timeout"].total_seconds() == 7
    # The ranks of one host use the loopback interface alone.
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    "change", [{"RANK": "first"}, {"TORCH_EXCHANGE_TIMEOUT_S": "soon"}, {"TORCH_STORE_FILE": None}]
)
def test_an_environment_that_names_no_rank_is_rejected(change: dict[str, str | None]) -> None:
    given = {**local_torch_variables(0, 1, Path("/store")), **change}
    variables = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ConfigurationError, match="Start it through the launcher or torchrun"):
        TorchCommunicator.join(variables, "cpu")
