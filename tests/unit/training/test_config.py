import re

import pytest
from pydantic import ValidationError

from tasks.training.config import (
    EXECUTION_FIELDS,
    LaunchConfig,
    ReadingConfig,
    TrainingConfig,
    model_trained,
)

STRATEGIES = [
    ({"gradient_compression": "topk"}, "Input should be 'none', 'fp16' or 'powersgd'"),
    ({"name": "fsdp", "gradient_compression": "fp16"}, "fp16 is for horovod and ddp alone"),
    ({"name": "fsdp", "local_steps": 4}, "local_steps=4 is for horovod and ddp alone"),
    ({"name": "fsdp", "asynchronous": True}, "asynchronous=True is for horovod and ddp"),
    ({"local_steps": 2, "max_gradient_norm": 1.0}, "max_gradient_norm=1.0 needs the"),
    ({"local_steps": 2, "precision": "fp16"}, "precision=fp16 needs the"),
    ({"precision": "fp16", "gradient_compression": "powersgd"}, "use precision='bf16' or"),
    ({"asynchronous": True, "gradient_compression": "fp16"}, "asynchronous ranks average"),
    ({"name": "fsdp", "compile": True}, "compile=True is for horovod and ddp"),
]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"launch": {"ranks": 0}}, "validation error"),
        ({"learning_rate": 0.0}, "validation error"),
        ({"dropout": 1.0}, "validation error"),
        ({"hidden_sizes": ()}, "validation error"),
        ({"strategy": {"name": "gossip"}}, "validation error"),
        ({"device": "tpu"}, "validation error"),
        ({"epochs": 3}, "validation error"),
        ({"launch": {"threads_per_rank": 0}}, "validation error"),
        ({"launch": {"min_gain": 1}}, "validation error"),
        *(({"strategy": fields}, sentence) for fields, sentence in STRATEGIES),
        ({"model": "xgboost"}, "expected network, gradient-boosting, average, or package:function"),
        ({"model": "my-package:build"}, "is no model"),
        (
            {"model": "gradient-boosting", "start": "champion"},
            "start='champion' moves a network's weights",
        ),
        (
            {"elastic": {"enabled": True}, "strategy": {"name": "fsdp"}},
            "each rank must hold the whole network",
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        TrainingConfig.model_validate(wrong)


def test_what_is_computed_does_not_depend_on_how_it_is_carried_out() -> None:
    one = TrainingConfig()
    two = TrainingConfig(
        launch=LaunchConfig(ranks=2),
        reading=ReadingConfig.model_validate({"mode": "stream"}),  # of an earlier release
        progress_timeout_s=7,
    )
    assert one.computation() == two.computation()
    assert one.computation() != TrainingConfig(seed=1).computation()
    shuffled = TrainingConfig(reading=ReadingConfig(shuffle_rows=1024))
    assert one.computation() != shuffled.computation()
    assert {*TrainingConfig.model_fields, "stall_warning_s"} >= EXECUTION_FIELDS


def test_a_version_of_an_earlier_release_named_its_framework() -> None:
    assert TrainingConfig.model_validate({"network": "torch"}) == TrainingConfig()


def test_the_model_of_a_use_case_is_that_of_its_training() -> None:
    assert model_trained({"name": "a", "model": "average", "training": {"seed": 3}}) == {
        "name": "a",
        "training": {"model": "average", "seed": 3},
    }
    assert model_trained({"name": "a"}) == {"name": "a"}
    with pytest.raises(ValueError, match="write one"):
        model_trained({"model": "average", "training": {"model": "network"}})
