from pathlib import Path

import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.training.launch.rendezvous import local_torch_variables
from tasks.training.strategies.communicators import TorchCommunicator, join
from tasks.training.strategies.config import StrategyConfig


@pytest.mark.parametrize("name", ["horovod", "ddp"])
def test_a_process_that_is_no_rank_does_not_train_alone_in_silence(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("HOROVOD_HOSTNAME", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigurationError, match="Start it through the launcher or"):
        join(StrategyConfig.model_validate({"name": name}), "cpu")


@pytest.mark.parametrize(
    "change", [{"RANK": "first"}, {"TORCH_EXCHANGE_TIMEOUT_S": "soon"}, {"TORCH_STORE_FILE": None}]
)
def test_an_environment_that_names_no_rank_is_rejected(change: dict[str, str | None]) -> None:
    given = {**local_torch_variables(0, 1, Path("/store")), **change}
    variables = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ConfigurationError, match="Start it through the launcher or torchrun"):
        TorchCommunicator(variables, "cpu")
