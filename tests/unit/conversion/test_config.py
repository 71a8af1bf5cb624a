from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.conversion.config import ConversionConfig, QualityBound


def test_each_precision_has_its_own_bound() -> None:
    config = ConversionConfig()
    assert config.bound("fp32") is config.fp32
    assert config.bound("int8") is config.int8
    assert config.int8.max_gap > config.fp32.max_gap


def test_a_mean_bound_above_the_maximum_bound_is_refused() -> None:
    with pytest.raises(ValidationError, match="bounds nothing; set it to at most max_gap"):
        QualityBound(max_gap=0.01, mean_gap=0.02, auc_drop=0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": ("onnx-fp32", "onnx-fp32")}, "names something twice"),
        ({"batch_sizes": (1, 32, 1)}, "names something twice"),
        ({"targets": ("tensorrt-fp16",)}, "onnx-fp32"),
        ({"targets": ()}, "at least 1 item"),
        ({"timing_rounds": 5}, "greater than or equal to 6"),
        ({"minimum_gain": 0.9}, "greater than or equal to 1"),
        ({"calibration_rows": 0}, "greater than 0"),
        ({"batchsizes": (1,)}, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_reason(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ConversionConfig.model_validate(values)
