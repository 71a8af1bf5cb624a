"""What comes in broken: each gives a sentence, leaves nothing half-written, and spoils no other."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import numpy_helper

from tasks.contracts.conversion import PreparedRows, tabular_signature
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.convert import judge_variants
from tasks.conversion.kinds.text_embedding import TEXT_EMBEDDING
from tasks.conversion.targets.catalog import with_sources
from tasks.conversion.targets.onnx import MODEL_FILE, check_opset, export_onnx
from tasks.conversion.targets.pytorch import check_program, load_program
from tasks.conversion.variants import build_variant
from tasks.kernel.errors import ArtifactError, ConversionError, DataContractError, StorageError
from tasks.kernel.files import LEAST_FREE_BYTES
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.conversion.cases import Case
from tests.support.conversion.forging import changed
from tests.support.conversion.programs import (
    SmallNetwork,
    built,
    exported,
    registered,
)
from tests.support.conversion.text_cases import NAMES, TextCase
from tests.support.data.builders import COLUMNS, dataset
from tests.support.host.disks import SmallDisk, small_disk


@pytest.fixture
def rows(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store)


@pytest.fixture
def everything(quick: ConversionConfig) -> ConversionConfig:
    return quick.model_copy(update={"formats": NAMES})


def _half_written(store: ArtifactStore) -> list[str]:
    """Folders under `variants` that are not whole."""
    found = (store.root / "variants").iterdir()
    return [one.name for one in found if not (one / "value.json").exists()]


def test_a_form_that_the_runtime_cannot_load_is_dropped_and_the_others_are_judged(
    case: Case,
) -> None:
    def garbage(folder: Path) -> None:
        model = onnx.load(folder / MODEL_FILE)
        model.opset_import[0].version = 99
        onnx.save(model, folder / MODEL_FILE)

    forms = (changed(case.store, case.onnx, garbage), case.openvino, case.int8)
    variants = judge_variants(case.program, forms, case.rows, case.config, case.store)
    assert "ONNX Runtime cannot load the model" in variants[0].reason
    assert "opset 99" in variants[0].reason.lower()
    assert all(variant.latencies for variant in variants[1:])


def _fixed_reshape(folder: Path) -> None:
    """A graph that promises any number of rows and holds the number of one call."""
    model = onnx.load(folder / MODEL_FILE)
    name = model.graph.output[0].name
    for node in model.graph.node:
        for position, made in enumerate(node.output):
            if made == name:
                node.output[position] = "inner"
    model.graph.initializer.append(numpy_helper.from_array(np.array([649], np.int64), "fixed"))
    model.graph.node.append(onnx.helper.make_node("Reshape", ["inner", "fixed"], [name]))
    onnx.save(model, folder / MODEL_FILE)


def test_a_form_that_takes_one_size_of_call_alone_is_dropped_with_the_runtimes_reason(
    case: Case,
) -> None:
    form = changed(case.store, case.onnx, _fixed_reshape)
    forms = (form, case.openvino, case.int8)
    variants = judge_variants(case.program, forms, case.rows, case.config, case.store)
    assert "cannot answer a call of" in variants[0].reason
    assert "onnxruntime" in variants[0].reason
    assert all(variant.latencies for variant in variants[1:])


def test_an_answer_of_another_type_is_dropped(case: Case) -> None:
    def widened(folder: Path) -> None:
        model = onnx.load(folder / MODEL_FILE)
        output = model.graph.output[0]
        for node in model.graph.node:
            for position, made in enumerate(node.output):
                if made == output.name:
                    node.output[position] = "inner"
        double = onnx.TensorProto.DOUBLE
        model.graph.node.append(onnx.helper.make_node("Cast", ["inner"], [output.name], to=double))
        output.type.tensor_type.elem_type = double
        onnx.save(model, folder / MODEL_FILE)

    config = case.config.model_copy(update={"formats": ("onnx-fp32",)})
    form = changed(case.store, case.onnx, widened)
    (variant,) = judge_variants(case.program, (form,), case.rows, config, case.store)
    assert "it answers with float64, its signature promises float32" in variant.reason


def test_other_operator_sets_than_the_asked_one_are_refused(case: Case) -> None:
    program = load_program(case.store.path(case.program.program))
    model = export_onnx(program, case.program.signature)
    check_opset(model)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ConversionError, match=r"ai.onnx 20, com.microsoft 1, expected"):
        check_opset(model)


def _texts(store: ArtifactStore, ids: list[object]) -> PreparedRows:
    def build(folder: StagedFolder) -> PreparedRows:
        table = pa.table({"part": ["calibration"] * len(ids), "input_ids": ids})
        pq.write_table(table, folder.path / "texts.parquet")
        return PreparedRows(
            data=folder.artifact("texts.parquet"),
            num_calibration=len(ids),
            num_judged=1,
            made_from={},
        )

    return store.build_once("corpora", f"odd-{len(ids)}-{ids[-1] is None}", PreparedRows, build)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([[2, 5, 3]] * 8 + [None], "1 of 9 texts of the part 'calibration' are null"),
        ([[2, None, 3]] * 2 + [[2, 3]] * 8, "2 of 10 texts of the part 'calibration' are null"),
    ],
    ids=["no text", "no token"],
)
def test_nulls_among_calibrating_texts_are_counted(
    texts: TextCase, ids: list[object], told: str
) -> None:
    with pytest.raises(DataContractError, match=told):
        TEXT_EMBEDDING.read_calibration(
            texts.program, _texts(texts.store, ids), texts.config, texts.store
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, LEAST_FREE_BYTES + 8_000_000) as made:
        yield made


def _build_all(
    program: RegisteredProgram, case_rows: Case, config: ConversionConfig, store: ArtifactStore
) -> dict[str, BuiltVariant | StorageError]:
    """Every target by itself; what the disk refuses is kept as the error."""
    done: dict[str, BuiltVariant | StorageError] = {}
    for target in with_sources(config.formats):
        sources = [done[name] for name in target.made_from]
        if any(isinstance(source, StorageError) for source in sources):
            continue
        given = tuple(source for source in sources if isinstance(source, BuiltVariant))
        try:
            done[target.name] = build_variant(target, program, given, case_rows.rows, config, store)
        except StorageError as exc:
            done[target.name] = exc
    return done


@pytest.mark.slow
def test_a_disk_that_is_full_refuses_each_target_in_a_sentence_and_all_are_built_later(
    disk: SmallDisk, everything: ConversionConfig
) -> None:
    store = ArtifactStore(disk.folder / "artifacts")
    rows = dataset(store)
    program = registered(store, rows, exported(SmallNetwork()))
    first = built(program, rows, everything.model_copy(update={"formats": ("onnx-fp32",)}), store)
    case = Case(store, rows, program, everything, *first * 3)
    with disk.filled():
        refused = _build_all(program, case, everything, store)
    assert isinstance(refused.pop("onnx-fp32"), BuiltVariant)  # it was there
    assert "openvino-fp32" in refused
    for error in refused.values():
        assert isinstance(error, StorageError)
        assert "are free on its disk" in str(error)
    assert _half_written(store) == []
    later = _build_all(program, case, everything, store)
    assert set(later) == set(NAMES)
    for form in later.values():
        assert isinstance(form, BuiltVariant)
        assert form.failure is None


@pytest.fixture(scope="module")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    path.write_bytes(exported(SmallNetwork()))
    return path


class _WritesAFile:
    """Runs when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def _changed(source: Path, target: Path, ending: str, change: bytes) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change if name.endswith(ending) else old.read(name))
    return target


def test_a_program_with_two_answers_is_a_sentence(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return numbers + 1, numbers - 1

    torch.export.save(torch.export.export(Two(), (torch.ones(2, 3),)), tmp_path / "two.pt2")
    with pytest.raises(ArtifactError, match=r"two\.pt2 gives 2 tensors, expected one"):
        load_program(tmp_path / "two.pt2")


def test_a_program_with_a_pickled_object_is_refused_before_it_runs(
    program_file: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "was-here"
    content = tmp_path / "payload.pt"
    torch.save((_WritesAFile(trace),), content)
    tampered = _changed(program_file, tmp_path / "t.pt2", "model.pt", content.read_bytes())
    with pytest.raises(ArtifactError, match="unpickling can run any code"):
        load_program(tampered)
    assert not trace.exists()


def test_a_program_that_marks_a_weight_as_pickled_is_refused(
    program_file: Path, tmp_path: Path
) -> None:
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"table": entry}}).encode()
    tampered = _changed(program_file, tmp_path / "t.pt2", "weights_config.json", config)
    with pytest.raises(ArtifactError, match=r"weights_config\.json"):
        load_program(tampered)


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps({"a": 1}), None])
def test_a_file_that_is_no_program_is_refused_with_a_sentence(
    content: bytes | None, tmp_path: Path, program_file: Path
) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(program_file.read_bytes()[:-400] if content is None else content)
    with pytest.raises(ArtifactError, match=r"cannot be read as a torch\.export program"):
        load_program(path)


def test_a_program_of_other_columns_is_refused(program_file: Path) -> None:
    fewer = DatasetSchema(**{**COLUMNS.model_dump(), "numeric": COLUMNS.numeric[:-1]})
    with pytest.raises(ConversionError, match=r"'numeric' is float32 \['any', 5\], .* 4\]"):
        check_program(load_program(program_file), tabular_signature(fewer))
