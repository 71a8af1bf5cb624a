"""Targets and families: what must hold for every one that is ever added."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tasks.contracts.conversion import PreparedRows, SnapshotRows
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.interface import Family
from tasks.conversion.kinds.registry import FAMILIES, family_of
from tasks.conversion.targets.interface import Target
from tasks.conversion.targets.registry import PRECISIONS, TARGET, TARGETS, target_of, with_sources
from tasks.conversion.variants import library_versions
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.conversion.cases import Case
from tests.support.data.builders import dataset, splits

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def test_names_are_unique() -> None:
    assert len(TARGET) == len(TARGETS)


@each_target
def test_a_target_is_made_from_earlier_ones_only(target: Target) -> None:
    earlier = {other.name for other in TARGETS[: TARGETS.index(target)]}
    assert set(target.made_from) <= earlier


@each_target
def test_a_target_names_settings_and_packages_that_exist(target: Target) -> None:
    assert set(target.settings) <= set(ConversionConfig.model_fields)
    assert set(library_versions(*target.packages)) == set(target.packages)
    assert set(target.hardware) <= {"cpu", "gpu"}
    assert not target.needs_calibration or {"calibration_rows", "seed"} <= set(target.settings)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_has_a_bound_for_every_precision(family: Family) -> None:
    assert set(PRECISIONS) <= set(family.bounds)


def test_what_a_target_is_made_from_comes_before_it_however_deep() -> None:
    assert [t.name for t in with_sources(["openvino-int8"])] == [
        "onnx-fp32",
        "openvino-fp32",
        "openvino-int8",
    ]
    assert [t.name for t in with_sources(["onnx-fp16", "onnx-fp32"])] == ["onnx-fp32", "onnx-fp16"]


@pytest.mark.parametrize(
    ("hardware_class", "fits"), [("gpu", True), ("gpu-h200", True), ("cpu", False)]
)
def test_hardware_may_be_told_closer(hardware_class: str, fits: bool) -> None:
    assert target_of("onnx-fp16").is_for(hardware_class) is fits


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="no target 'onnx-fp8'; there are onnx-fp32, "):
        target_of("onnx-fp8")


def test_a_family_that_nobody_wrote_is_refused_with_a_sentence(case: Case) -> None:
    program = case.program.model_copy(update={"family": "speech"})
    with pytest.raises(ConfigurationError, match="'speech', conversion knows tabular, text-"):
        family_of(program)


def test_rows_of_another_kind_are_refused_with_a_sentence(case: Case) -> None:
    assert case.onnx.files is not None
    prepared = PreparedRows(data=case.onnx.files, num_calibration=1, num_judged=1, made_from={})
    with pytest.raises(ConfigurationError, match="with the rows of a validated snapshot"):
        FAMILIES["tabular"].read_judged(case.program, prepared, case.config, case.store)
    snapshot = SnapshotRows(dataset=dataset(case.store), splits=splits())
    with pytest.raises(ConfigurationError, match="with prepared token ids"):
        FAMILIES["text-embedding"].read_judged(case.program, snapshot, case.config, case.store)


def test_a_program_of_a_table_needs_no_signature_and_another_one_does(case: Case) -> None:
    values = case.program.model_dump(exclude={"signature"})
    assert RegisteredProgram.model_validate(values) == case.program
    with pytest.raises(ValueError, match="needs its signature, or the columns"):
        RegisteredProgram.model_validate(values | {"columns": None})


def test_a_configuration_is_checked_without_any_runtime() -> None:
    program = """if True:
        import sys, tasks.conversion.config
        heavy = {"torch", "onnx", "onnxruntime", "openvino", "nncf"} & set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=PROJECT_ROOT)
