from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from tasks.contracts.data import ValidatedDataset
from tasks.conversion.config import ConversionConfig
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.provenance import schema_digest
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.kernel.errors import StorageError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.conversion.cases import Case
from tests.support.conversion.programs import (
    ClashingNames,
    Elementwise,
    SmallNetwork,
    build_one,
    built,
    exported,
    registered,
)
from tests.support.data.builders import dataset


def _model(case: Case) -> onnx.ModelProto:
    assert case.onnx.files is not None
    return onnx.load(case.store.path(case.onnx.files) / MODEL_FILE)


@pytest.fixture
def rows(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1024])
def test_any_number_of_rows_scores_as_pytorch_does(
    case: Case, edges: ModelInputs, num_rows: int
) -> None:
    batch = edges.block(0, num_rows)
    gap = np.abs(case.load_source()(batch) - case.load(case.onnx)(batch))
    assert gap.max() < 1e-6


def test_the_file_names_its_axes_and_pins_its_opset(case: Case) -> None:
    model = _model(case)
    axes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*model.graph.input, *model.graph.output)
    }
    assert axes == {"categorical": ["batch", 3], "numeric": ["batch", 5], "score": ["batch"]}
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
    assert case.onnx.settings["opset"] == "20"


def test_the_file_says_where_it_comes_from(case: Case) -> None:
    assert case.onnx.files is not None
    session = ort.InferenceSession(
        case.store.path(case.onnx.files) / MODEL_FILE, providers=["CPUExecutionProvider"]
    )
    assert session.get_modelmeta().custom_metadata_map == {
        "falaj.program_sha256": case.program.program.sha256,
        "falaj.snapshot_sha256": case.dataset.snapshot.data.sha256,
        "falaj.schema_digest": schema_digest(case.program),
        "falaj.precision": "fp32",
        "falaj.target": "onnx-fp32",
        "falaj.versions": case.onnx.provenance["versions"],
    }


def test_two_conversions_give_the_same_bytes(case: Case, store: ArtifactStore) -> None:
    rows = dataset(store)
    program = registered(store, rows, case.store.path(case.program.program).read_bytes())
    again = build_one("onnx-fp32", program, rows, case.config, store)
    assert again.files is not None
    assert case.onnx.files is not None
    assert again.files.sha256 == case.onnx.files.sha256


def test_nothing_of_the_exporting_machine_is_in_the_file(case: Case) -> None:
    content = _model(case).SerializeToString()
    assert str(PROJECT_ROOT).encode() not in content
    assert b"site-packages" not in content
    assert b"File " not in content


def test_parameters_named_like_inputs_and_output_do_not_break_the_file(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig, edges: ModelInputs
) -> None:
    program = registered(store, rows, exported(ClashingNames()))
    built = build_one("onnx-fp32", program, rows, quick, store)
    assert built.failure is None
    case = Case(store, rows, program, quick, built, built, built)
    gap = np.abs(case.load_source()(edges) - case.load(built)(edges))
    assert gap.max() < 1e-6


def test_an_operator_that_onnx_lacks_is_a_sentence_that_is_kept(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig
) -> None:
    network = Elementwise(lambda numbers: torch.special.gammaln(numbers).sum(1))
    program = registered(store, rows, exported(network))
    built = build_one("onnx-fp32", program, rows, quick, store)
    assert built.files is None
    assert built.failure is not None
    assert "cannot be written as ONNX opset 20: No ONNX function found" in built.failure
    assert "lgamma" in built.failure
    assert [p.name for p in (store.root / "variants").rglob("*") if p.is_file()] == ["value.json"]


def test_a_program_for_a_fixed_number_of_rows_is_a_failure(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig
) -> None:
    program = registered(store, rows, exported(SmallNetwork(), rows=4, dynamic=False))
    built = build_one("onnx-fp32", program, rows, quick, store)
    assert built.failure is not None
    assert "has 4 fixed where any number is promised (batch)" in built.failure
    assert "export the program with a dynamic batch axis" in built.failure


def test_a_form_that_no_target_needs_is_not_built(
    store: ArtifactStore, rows: ValidatedDataset, quick: ConversionConfig
) -> None:
    config = quick.model_copy(update={"formats": ("onnx-fp32",)})
    program = registered(store, rows, exported(SmallNetwork()))
    assert [one.name for one in built(program, rows, config, store)] == ["onnx-fp32"]
    assert len(list((store.root / "variants").iterdir())) == 1


@pytest.mark.slow
def test_a_full_disk_is_a_storage_error_and_leaves_nothing_visible(
    store: ArtifactStore,
    rows: ValidatedDataset,
    quick: ConversionConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = registered(store, rows, exported(SmallNetwork()))

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left on device"):
        build_one("onnx-fp32", program, rows, quick, store)
    assert list((store.root / "variants").iterdir()) == []
    monkeypatch.undo()
    assert build_one("onnx-fp32", program, rows, quick, store).failure is None
