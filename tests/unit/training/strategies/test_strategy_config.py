from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from tasks.training.strategies.config import StrategyConfig


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
