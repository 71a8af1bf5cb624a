from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from tasks.conversion.config import ConversionConfig, HardwareConversion, QualityBound
from tasks.conversion.kinds.interface import Family
from tasks.conversion.kinds.registry import FAMILIES, bound_of
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.targets.registry import PRECISIONS, TARGETS, target_of
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_each_precision_has_its_own_bound(family: Family) -> None:
    bounds = [bound_of(family, precision, ConversionConfig()) for precision in PRECISIONS]
    assert bounds == [family.bounds[precision] for precision in PRECISIONS]
    assert family.bounds["int8"].max_gap > family.bounds["fp32"].max_gap


def test_a_bound_of_the_configuration_goes_before_that_of_the_family() -> None:
    config = ConversionConfig.model_validate(
        {"bounds": {"int8": {"max_gap": 0.3, "mean_gap": 0.1, "quality_drop": 0.2}}}
    )
    assert bound_of(TABULAR, "int8", config).max_gap == 0.3
    assert bound_of(TABULAR, "fp32", config) == TABULAR.bounds["fp32"]


def test_a_precision_without_any_bound_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"set conversion\.bounds\.int4"):
        bound_of(TABULAR, "int4", ConversionConfig())


def test_a_form_offers_the_targets_as_choices() -> None:
    schema = ConversionConfig.model_json_schema()["properties"]["targets"]
    assert schema["items"]["enum"] == [target.name for target in TARGETS]


def test_a_mean_bound_above_the_maximum_bound_is_refused() -> None:
    with pytest.raises(ValidationError, match="bounds nothing; set it to at most max_gap"):
        QualityBound(max_gap=0.01, mean_gap=0.02, quality_drop=0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": ("onnx-fp32", "onnx-fp32")}, "names something twice"),
        ({"batch_sizes": (1, 32, 1)}, "names something twice"),
        (
            {"targets": ("tensorrt-fp64",)},
            "there is no target 'tensorrt-fp64'; there are onnx-fp32",
        ),
        (
            {"bounds": {"int3": {"max_gap": 0.1, "mean_gap": 0.1, "quality_drop": 0}}},
            "bounds name int3, which no target has",
        ),
        ({"hardware_class": "toaster"}, "should match pattern"),
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


def test_another_kind_of_machine_has_its_own_targets_and_the_rest_stays() -> None:
    config = ConversionConfig(threads=3, seed=7)
    hardware = HardwareConversion(hardware_class="gpu", targets=("onnx-fp16",))
    there = config.on(hardware)
    assert (there.hardware_class, there.targets) == ("gpu", ("onnx-fp16",))
    assert (there.threads, there.seed) == (3, 7)
    assert config.on(None) == config


def test_the_deployment_on_the_gpu_pool_names_targets_that_are_for_it() -> None:
    deployed = yaml.safe_load((PROJECT_ROOT / "prefect.yaml").read_text())["deployments"]
    (told,) = [
        one["parameters"]["hardware"]
        for one in deployed
        if one["entrypoint"].endswith("conversion_flow") and one["name"] == "gpu"
    ]
    there = ConversionConfig().on(HardwareConversion.model_validate(told))
    assert all(target_of(name).is_for(there.hardware_class) for name in there.targets)
    assert set(there.targets) == {t.name for t in TARGETS if t.is_for("gpu")}
    assert there.triton is not None
