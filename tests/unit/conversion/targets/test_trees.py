from pathlib import Path

import numpy as np
import onnx
import pytest

from tasks.contracts.conversion import SnapshotRows
from tasks.contracts.evaluation import Calibrator
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.calibrator import check_mapped, write_mapped
from tasks.conversion.examine import examine, take_reference
from tasks.conversion.kinds.tabular import TABULAR, edge_rows, magnitude_rows, read_rows
from tasks.conversion.targets.interface import ConversionJob, Runtime, load_files
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tasks.conversion.targets.trees import DOMAIN
from tasks.kernel.settings import ArtifactStore
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.models.making import make_model
from tests.support.conversion.programs import QUICK, build_one, tabular_job
from tests.support.data.builders import CLASSES, COLUMNS, class_frame, dataset, splits, version_ref
from tests.support.training.boosted import boosted, boosting_config


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> ConversionJob:
    folder = tmp_path_factory.mktemp("trees")
    store = ArtifactStore(folder / "store")
    return tabular_job(store, store.path(boosted(store, folder / "work").program).read_bytes())


@pytest.mark.parametrize(
    "name", ["onnx-fp32", pytest.param("openvino-fp32", marks=pytest.mark.slow)]
)
def test_every_format_gives_the_probabilities_of_several_classes(
    store: ArtifactStore, tmp_path: Path, name: str
) -> None:
    data = dataset(store, class_frame(), CLASSES)
    request = TrainingRequest(data, splits(), boosting_config(max_iterations=10))
    model = make_model(request, store, tmp_path)
    program = RegisteredProgram(
        version=version_ref(model.program.sha256), program=model.program, columns=CLASSES
    )
    job = ConversionJob(program, SnapshotRows(dataset=data, splits=splits()), QUICK, store)
    built = build_one(name, job)
    assert built.files is not None, built.failure
    with torch_threads_restored():
        examined = examine(built, take_reference(job))
    assert examined.failure is None
    assert examined.gaps is not None
    assert examined.gaps["edge"].largest < 1e-4
    assert program.signature.output.columns == CLASSES.classes


@pytest.mark.parametrize("name", ["onnx-fp32", "openvino-fp32", "onnx-fp16"])
def test_every_format_of_boosted_trees_answers_as_the_program_does(
    trees: ConversionJob, name: str
) -> None:
    built = build_one(name, trees)
    assert built.files is not None, built.failure
    signature, store = trees.program.signature, trees.store
    typical = read_rows(trees.rows.dataset, COLUMNS, splits().test, store, limit=500).inputs
    with torch_threads_restored():
        program = load_pytorch(store.path(trees.program.program), signature, Runtime())
        converted = load_files(name, store.path(built.files), signature, Runtime())
        most = TABULAR.bounds[built.precision].max_gap
        for inputs in (typical, edge_rows(typical, 512), magnitude_rows(typical, 512)):
            gap = np.abs(program(inputs) - converted(inputs)).max()
            assert gap < most, gap
        one = np.concatenate([converted(row) for row in typical.block(0, 50).blocks(1)])
        assert np.abs(one - converted(typical.block(0, 50))).max() < most / 4


def built_onnx(name: str, job: ConversionJob) -> tuple[list[str], set[str]]:
    """Operators of a form, and the domains that they are of."""
    built = build_one(name, job)
    assert built.files is not None, built.failure
    model = onnx.load(job.store.path(built.files) / "model.onnx")
    return [n.op_type for n in model.graph.node], {entry.domain for entry in model.opset_import}


def test_onnx_walks_down_the_trees_and_what_is_made_of_it_multiplies(trees: ConversionJob) -> None:
    operators, _ = built_onnx("onnx-fp32", trees)
    assert operators.count("TreeEnsembleRegressor") == 1
    assert "MatMul" not in operators
    of_half, domains = built_onnx("onnx-fp16", trees)
    assert "MatMul" in of_half
    assert DOMAIN not in domains


def test_trees_whose_scores_are_mapped_anew_stay_trees(
    trees: ConversionJob, tmp_path: Path
) -> None:
    store, after = trees.store, tmp_path / "mapped.pt2"
    before = store.path(trees.program.program)
    rows = trees.rows.dataset
    steep = Calibrator(slope=1.7, intercept=-0.4)
    assert write_mapped(before, after, COLUMNS, steep) == steep
    inputs = read_rows(rows, COLUMNS, splits().test, store, limit=500).inputs
    check_mapped(before, after, COLUMNS, steep, inputs)
    operators, _ = built_onnx("onnx-fp32", tabular_job(store, after.read_bytes()))
    assert "TreeEnsembleRegressor" in operators
