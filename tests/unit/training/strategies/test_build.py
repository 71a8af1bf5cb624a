from __future__ import annotations

import importlib

import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Strategy
from tasks.training.strategies.build import STRATEGIES, join
from tasks.training.strategies.config import StrategyConfig


@pytest.mark.parametrize("name", ["horovod", "ddp"])
def test_a_process_that_is_no_rank_does_not_train_alone_in_silence(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("HOROVOD_HOSTNAME", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigurationError, match="Start it through the launcher or"):
        join(StrategyConfig.model_validate({"name": name}), "cpu")


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_is_where_the_table_says(kind: str) -> None:
    module, _, name = STRATEGIES[kind].partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), Strategy)
