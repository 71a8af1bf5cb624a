"""Provenance metadata: written last, read back, and checked by everyone who loads a variant."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from tasks.contracts.release import ModelVariant
from tasks.conversion.convert import judge_variants
from tasks.conversion.kinds.tabular import tabular_inputs
from tasks.conversion.provenance import check_sample
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.interface import ModelInputs, Runtime, converter_of
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.conversion.targets.openvino import read_ir, without_reporting
from tasks.conversion.variants import load_variant, open_variant
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.files import digest_of
from tests.support.conversion.cases import Case
from tests.support.conversion.forging import Change, changed, edited
from tests.support.conversion.programs import with_formats
from tests.support.data.builders import COLUMNS, frame
from tests.support.suite.promises import Promise, proves


@pytest.mark.parametrize("name", ["onnx-fp32", "openvino-fp32", "openvino-int8"])
def test_files_carry_all_that_is_known_of_them(case: Case, name: str) -> None:
    one = next(variant for variant in case.built if variant.name == name)
    seen = converter_of(FORMAT[name]).read_provenance(case.store.path(one.files))
    assert seen == one.provenance
    assert seen["target"] == name
    assert seen["precision"] == one.precision
    assert seen["program_sha256"] == case.program.program.sha256
    assert seen["snapshot_sha256"] == case.program.version.snapshot_sha256
    for package in FORMAT[name].packages:
        assert f"{package} " in seen["versions"]
    calibrated = FORMAT[name].needs_calibration
    assert ({"calibration_rows", "calibration_sha256"} <= set(seen)) == calibrated
    if calibrated:
        assert seen["calibration_rows"] == one.settings["calibration_rows"]


def _onnx_provenance(values: dict[str, str]) -> Change:
    def restamp(model: onnx.ModelProto) -> None:
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, values)

    return edited(restamp)


def _no_openvino_provenance(folder: Path) -> None:
    ov = without_reporting("openvino")
    model = read_ir(folder)
    bare = ov.Model(model.get_results(), model.get_parameters(), "bare")
    aside = folder.parent / "aside"
    ov.save_model(bare, aside / "model.xml", compress_to_fp16=False)
    del model, bare
    for file in ("model.xml", "model.bin"):
        (aside / file).replace(folder / file)


@proves(Promise.CONVERSION, "a file that does not say what it is made from is not loaded")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("onnx-fp32", _onnx_provenance({"author": "somebody"})),
        ("openvino-fp32", _no_openvino_provenance),
    ],
)
def test_a_variant_that_lost_its_provenance_is_refused(
    case: Case, name: str, change: Change
) -> None:
    built = next(variant for variant in case.built if variant.name == name)
    bare = changed(case.store, built, change)
    with pytest.raises(ArtifactError, match=f"the files of {name} carry no provenance"):
        load_variant(bare, case.program, Runtime(), case.store)
    (variant,) = judge_variants(with_formats(case, name), (bare,))
    assert not variant.accepted
    assert "carry no provenance" in variant.reason


@pytest.mark.parametrize("field", ["program_sha256", "snapshot_sha256", "schema_digest", "target"])
def test_provenance_of_something_else_is_refused(case: Case, field: str) -> None:
    stamps = {**case.onnx.provenance, field: "x"}
    change = _onnx_provenance({f"falaj.{name}": value for name, value in stamps.items()})
    other = changed(case.store, case.onnx, change)
    with pytest.raises(ArtifactError, match=f"have the {field} 'x', expected"):
        load_variant(other, case.program, Runtime(), case.store)
    told = case.onnx.model_copy(update={"provenance": stamps})
    with pytest.raises(ArtifactError, match=f"have the {field} .*, expected 'x'"):
        load_variant(told, case.program, Runtime(), case.store)


def test_a_file_that_changed_after_it_was_recorded_is_refused(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    content = bytearray((case.store.path(case.onnx.files) / MODEL_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / MODEL_FILE).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"have SHA-256 {digest_of(folder)[:12]}, expected"):
        open_variant(folder, case.onnx, case.program, Runtime())


@pytest.fixture(scope="module")
def judged(case: Case) -> ModelVariant:
    (variant,) = judge_variants(with_formats(case, "onnx-fp32"), case.built)
    return variant


@pytest.mark.parametrize("name", ["runtime", "provider"])
def test_a_variant_is_not_served_by_what_it_was_not_judged_with(
    case: Case, judged: ModelVariant, name: str
) -> None:
    elsewhere = judged.model_copy(update={"settings": {**judged.settings, name: "onnxruntime 0.1"}})
    with pytest.raises(
        ConversionError, match=f"was judged with {name} 'onnxruntime 0.1' and would"
    ):
        load_variant(elsewhere, case.program, Runtime(), case.store)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda codes, numbers: (codes[:1], numbers[:1]), "1 rows calibrate it, 1 of them"),
        (lambda codes, numbers: (codes, numbers * np.nan), "40 rows calibrate it, 0 of them"),
        (lambda codes, numbers: (codes[:0], numbers[:0]), "0 rows calibrate it"),
    ],
    ids=["one row", "nothing but nulls", "no row"],
)
def test_rows_that_show_no_range_cannot_calibrate(
    change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]], told: str
) -> None:
    codes, numbers = COLUMNS.model_inputs(frame(40))
    check_sample([tabular_inputs(codes, numbers)])
    check_sample([ModelInputs({"ids": np.ones((8, 4), np.int64)})])  # integers alone
    with pytest.raises(ConversionError, match=f"{told}.* expected at least 8"):
        check_sample([tabular_inputs(*change(codes, numbers))])
