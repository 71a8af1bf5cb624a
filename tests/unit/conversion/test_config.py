"""The configuration, the formats and the kinds of models: what holds for every one ever added."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import yaml
from pydantic import ValidationError

from tasks.contracts.release import BuiltVariant
from tasks.conversion.config import ConversionConfig, HardwareConversion
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.provenance import library_versions
from tasks.conversion.targets.catalog import FORMAT, FORMATS, Format, format_of
from tasks.conversion.targets.interface import CONVERTERS
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.conversion.cases import Case


@pytest.mark.parametrize("made", FORMATS, ids=lambda made: made.name)
def test_a_format_names_sources_settings_and_packages_that_exist(made: Format) -> None:
    assert FORMAT[made.name] is made
    assert set(made.made_from) <= {other.name for other in FORMATS[: FORMATS.index(made)]}
    assert set(made.settings) <= set(ConversionConfig.model_fields)
    assert set(library_versions(made)) == set(made.packages)
    assert set(made.hardware) <= {"cpu", "gpu"}
    assert made.file_format in CONVERTERS


def test_the_build_of_a_package_for_gpus_counts_as_that_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version_of(package: str) -> str:
        if package.endswith("-gpu"):
            return f"version of {package}"
        raise PackageNotFoundError(package)

    monkeypatch.setattr("tasks.conversion.provenance.version", version_of)
    assert library_versions(replace(FORMATS[0], packages=("onnxruntime",))) == {
        "onnxruntime": "version of onnxruntime-gpu"
    }


def test_a_package_that_is_not_there_is_named_as_it_was_asked_for() -> None:
    with pytest.raises(PackageNotFoundError, match=r"unheard-of$"):
        library_versions(replace(FORMATS[0], packages=("unheard-of",)))


def test_unknown_formats_and_kinds_are_refused(case: Case) -> None:
    with pytest.raises(ConfigurationError, match="onnx-fp8"):
        format_of("onnx-fp8")
    with pytest.raises(ConfigurationError, match="speech"):
        kind_of(case.program.model_copy(update={"family": "speech"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"formats": ("onnx-fp32", "onnx-fp32")}, "names something twice"),
        ({"batch_sizes": (1, 32, 1)}, "names something twice"),
        ({"formats": ("tensorrt-fp64",)}, "tensorrt-fp64"),
        (
            {"bounds": {"int3": {"max_gap": 0.1, "mean_gap": 0.1, "quality_drop": 0}}},
            "bounds name int3",
        ),
        ({"hardware_class": "toaster"}, "should match pattern"),
        ({"targets": ("onnx-fp32",), "formats": ("onnx-fp32",)}, "Extra inputs"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_reason(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ConversionConfig.model_validate(values)


def test_names_of_earlier_versions_are_read(case: Case) -> None:
    assert ConversionConfig.model_validate({"targets": ["onnx-fp32"]}).formats == ("onnx-fp32",)
    stored = case.onnx.model_dump(mode="json")
    assert stored["stamp"] == case.onnx.provenance
    assert BuiltVariant.model_validate(stored) == case.onnx


def test_the_deployment_on_the_gpu_pool_names_the_formats_that_are_for_it() -> None:
    deployed = yaml.safe_load((PROJECT_ROOT / "prefect.yaml").read_text())["deployments"]
    (hardware,) = [
        one["parameters"]["hardware"]
        for one in deployed
        if one["entrypoint"].endswith("conversion_flow") and one["name"] == "gpu"
    ]
    there = ConversionConfig().on(HardwareConversion.model_validate(hardware))
    assert set(there.formats) == {made.name for made in FORMATS if made.is_for("gpu")}
    assert there.triton is not None
