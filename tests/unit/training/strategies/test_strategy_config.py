from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import STRATEGIES, strategy_kind


def config(**fields: object) -> StrategyConfig:
    return StrategyConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gradient_compression": "topk"}, "Input should be 'none', 'fp16' or 'powersgd'"),
        ({"name": "fsdp", "gradient_compression": "fp16"}, "fp16 is for horovod and ddp alone"),
        ({"name": "fsdp", "local_steps": 4}, "local_steps=4 is for horovod and ddp alone"),
        ({"name": "fsdp", "asynchronous": True}, "asynchronous=True is for horovod and ddp"),
        (
            {"local_steps": 2, "max_gradient_norm": 1.0},
            "max_gradient_norm=1.0 needs the",
        ),
        ({"local_steps": 2, "precision": "fp16"}, "precision=fp16 needs the"),
        ({"precision": "fp16", "gradient_compression": "powersgd"}, "use precision='bf16' or"),
        (
            {"asynchronous": True, "gradient_compression": "fp16"},
            "asynchronous ranks average",
        ),
        ({"name": "fsdp", "compile": True}, "compile=True is for horovod and ddp"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        config(**fields)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "horovod"),
        ({"name": "ddp"}, "ddp"),
        ({"name": "ddp", "gradient_compression": "powersgd"}, "horovod"),
        ({"name": "ddp", "local_steps": 4}, "local-sgd"),
        ({"asynchronous": True}, "asynchronous"),
    ],
)
def test_how_a_rank_steps_comes_before_by_which_library_it_talks(
    fields: dict[str, object], kind: str
) -> None:
    assert strategy_kind(config(**fields)) == kind
    assert kind in STRATEGIES
