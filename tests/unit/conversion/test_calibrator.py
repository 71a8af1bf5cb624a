"""Another map of the scores in a program, in PyTorch and in the forms that are made of it."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from scipy.special import expit, logit
from torch import Tensor, nn

from tasks.contracts.conversion import tabular_signature
from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import Calibrator
from tasks.conversion.calibrator import check_mapped, mapped_outputs, write_mapped
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.tabular import edge_rows, read_rows
from tasks.conversion.targets.interface import ModelInputs, Runtime
from tasks.conversion.targets.onnx import MODEL_FILE
from tasks.conversion.targets.pytorch import load_program, load_pytorch
from tasks.kernel.errors import ArtifactError, ConversionError
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.programs import SmallNetwork, built, exported, tabular_job
from tests.support.data.builders import COLUMNS, dataset, month

NUMBER = COLUMNS.model_copy(update={"task": "regression", "label": "minutes", "unit": "minutes"})
STEEP, FLAT = Calibrator(slope=1.7, intercept=-0.4), Calibrator(slope=0.6, intercept=0.9)


class Predicting(SmallNetwork):
    """As a regression ends: the standardised label, times its deviation, plus its mean."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return torch.logit(super().forward(categorical, numeric)) * 12.5 + 40.0


class Raw(SmallNetwork):
    """Ends in neither."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return torch.exp(super().forward(categorical, numeric))


def write(folder: Path, network: nn.Module, name: str = "before.pt2") -> Path:
    path = folder / name
    path.write_bytes(exported(network))
    return path


def inputs(tmp_path: Path) -> ModelInputs:
    store = ArtifactStore(tmp_path / "artifacts")
    rows = read_rows(dataset(store), COLUMNS, month(1, 12), store).inputs
    edges = edge_rows(rows, 1024)
    return ModelInputs({name: np.concatenate((rows[name], edges[name])) for name in rows})


def scores(path: Path, rows: ModelInputs, columns: DatasetSchema = COLUMNS) -> np.ndarray:
    return load_pytorch(path, tabular_signature(columns), Runtime())(rows)


def test_the_program_gives_the_mapped_logit_and_keeps_the_order_in_every_runtime(
    tmp_path: Path,
) -> None:
    before, after = write(tmp_path, SmallNetwork()), tmp_path / "after.pt2"
    rows = inputs(tmp_path)
    assert write_mapped(before, after, COLUMNS, STEEP) == STEEP
    old, new = scores(before, rows), scores(after, rows)
    expected = expit(1.7 * logit(old.astype(np.float64)) - 0.4)
    assert np.abs(new - expected).max() < 1e-6
    assert np.diff(new[np.argsort(old, kind="stable")]).min() > -1e-6  # rounding, no more

    store = ArtifactStore(tmp_path / "artifacts")
    config = ConversionConfig(formats=("onnx-fp32",))
    (onnx,) = built(tabular_job(store, after.read_bytes(), config))
    session = ort.InferenceSession(
        store.path(onnx.files) / MODEL_FILE, providers=["CPUExecutionProvider"]
    )
    assert np.abs(session.run(None, dict(rows))[0] - new).max() < 1e-6


def test_maps_of_maps_are_one_map_in_a_program_that_grows_no_longer(tmp_path: Path) -> None:
    before = write(tmp_path, SmallNetwork())
    rows = inputs(tmp_path)
    first, second = tmp_path / "1.pt2", tmp_path / "2.pt2"
    write_mapped(before, first, COLUMNS, STEEP)
    assert write_mapped(first, second, COLUMNS, FLAT) == FLAT.after(STEEP)
    assert len(load_program(first).graph.nodes) == len(load_program(second).graph.nodes)
    old = logit(scores(before, rows).astype(np.float64))
    expected = mapped_outputs(old, FLAT.after(STEEP), "classification")
    assert np.abs(scores(second, rows) - expected).max() < 1e-6


def test_predictions_of_a_regression_are_mapped_within_the_labels_own_scale(tmp_path: Path) -> None:
    before, after = write(tmp_path, Predicting()), tmp_path / "after.pt2"
    rows = inputs(tmp_path)
    whole = write_mapped(before, after, NUMBER, STEEP)
    assert (whole.slope, whole.intercept) == pytest.approx((1.7 * 12.5, 1.7 * 40 - 0.4))
    assert len(load_program(before).graph.nodes) == len(load_program(after).graph.nodes)
    old = scores(before, rows, NUMBER).astype(np.float64)
    assert np.allclose(scores(after, rows, NUMBER), 1.7 * old - 0.4, rtol=1e-5, atol=1e-4)
    check_mapped(before, after, NUMBER, STEEP, rows)


def test_a_program_without_a_place_for_a_map_is_refused(tmp_path: Path) -> None:
    after = tmp_path / "after.pt2"
    with pytest.raises(ConversionError, match=r"exp\.default, expected scores of a sigmoid"):
        write_mapped(write(tmp_path, Raw()), after, COLUMNS, STEEP)
    with pytest.raises(ConversionError, match="expected scores multiplied by a number"):
        write_mapped(write(tmp_path, SmallNetwork()), after, NUMBER, STEEP)
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(b"PK no archive")
    with pytest.raises(ArtifactError, match="cannot be read as a torch"):
        write_mapped(damaged, after, COLUMNS, STEEP)
    assert not after.exists()


def test_scores_that_32_bits_hold_for_certain_are_mapped_by_their_logit(tmp_path: Path) -> None:
    class Certain(SmallNetwork):
        """Gives scores so near to 1 that many of them are 1."""

        def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
            return torch.sigmoid(torch.logit(super().forward(categorical, numeric)) * 9 + 15)

    before, after = write(tmp_path, Certain()), tmp_path / "after.pt2"
    rows = inputs(tmp_path)
    flat = Calibrator(slope=0.1, intercept=-1.5)
    write_mapped(before, after, COLUMNS, flat)
    assert scores(before, rows).max() == 1
    check_mapped(before, after, COLUMNS, flat, rows)
    assert scores(after, rows).max() < 0.9
