"""The configuration, the formats and the kinds of models: what holds for every one ever added."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest
import yaml
from pydantic import ValidationError

from tasks.contracts.conversion import PreparedRows, SnapshotRows
from tasks.contracts.release import BuiltVariant
from tasks.conversion.config import ConversionConfig, HardwareConversion
from tasks.conversion.kinds.interface import KINDS, ModelKind, bound_of, kind_of
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.kinds.tensors import TENSORS
from tasks.conversion.kinds.text_embedding import TEXT_EMBEDDING
from tasks.conversion.provenance import library_versions
from tasks.conversion.targets.catalog import (
    FORMAT,
    FORMATS,
    PRECISIONS,
    Format,
    format_of,
)
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
    assert not made.needs_calibration or "calibration_rows" in made.settings


@pytest.mark.parametrize("kind", [TABULAR, TEXT_EMBEDDING, TENSORS], ids=KINDS)
def test_each_precision_has_its_own_bound(kind: ModelKind) -> None:
    assert resolve_name(KINDS[kind.name]) is kind
    bounds = [bound_of(kind, precision, ConversionConfig()) for precision in PRECISIONS]
    assert bounds == [kind.bounds[precision] for precision in PRECISIONS]
    assert kind.bounds["int8"].max_gap > kind.bounds["fp32"].max_gap


def test_unknown_formats_and_kinds_are_refused(case: Case) -> None:
    with pytest.raises(ConfigurationError, match="onnx-fp8"):
        format_of("onnx-fp8")
    with pytest.raises(ConfigurationError, match="speech"):
        kind_of(case.program.model_copy(update={"family": "speech"}))


def test_rows_of_another_kind_are_refused(case: Case) -> None:
    assert case.onnx.files is not None
    prepared = PreparedRows(data=case.onnx.files, num_calibration=1, num_judged=1, made_from={})
    for kind, rows in ((TABULAR, prepared), (TEXT_EMBEDDING, case.rows)):
        assert isinstance(rows, PreparedRows | SnapshotRows)
        with pytest.raises(ConfigurationError, match="got rows"):
            kind.read_judged(case.program, rows, case.config, case.store)


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


def test_another_kind_of_machine_has_its_own_formats_and_the_rest_stays() -> None:
    config = ConversionConfig(threads=3, minimum_gain=1.5)
    there = config.on(HardwareConversion(hardware_class="gpu", formats=("onnx-fp16",)))
    assert (there.hardware_class, there.formats) == ("gpu", ("onnx-fp16",))
    assert (there.threads, there.minimum_gain) == (3, 1.5)
    assert config.on(None) == config


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
