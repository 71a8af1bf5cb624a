"""A family that the project does not know: one `ModelKind`, rows and a configuration suffice."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ConversionRows, PreparedRows, Signature, TensorSpec
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.convert import judge_variants
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.interface import Batches, JudgedRows, ModelKind, Wording
from tasks.conversion.kinds.registry import KINDS
from tasks.conversion.kinds.tabular import BOUNDS
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.conversion.programs import built

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="image", dtype="uint8", shape=("batch", 3, "height", "width")),
        TensorSpec(name="gain", dtype="float32", shape=("batch",)),
    ),
    output=TensorSpec(name="logits", dtype="float32", shape=("batch", 4)),
    largest={"batch": 256, "height": 64, "width": 64},
)


class Pictures(nn.Module):
    """Convolution, mean over the picture, classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters = nn.Conv2d(3, 8, 3, padding=1)
        self.classes = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        values = image.float() / 255 * gain[:, None, None, None]
        return self.classes(torch.relu(self.filters(values)).mean((2, 3)))


def _read(rows: ConversionRows, part: str, store: ArtifactStore) -> ModelInputs:
    with np.load(store.path(rows.data)) as arrays:
        return ModelInputs({name: arrays[f"{part}_{name}"] for name in ("image", "gain")})


def _calibration(
    program: RegisteredProgram, rows: ConversionRows, config: ConversionConfig, store: ArtifactStore
) -> Batches:
    return (_read(rows, "calibration", store),)


def _judged(
    program: RegisteredProgram, rows: ConversionRows, config: ConversionConfig, store: ArtifactStore
) -> JudgedRows:
    judged = _read(rows, "judged", store)

    def same_class(reference: np.ndarray, converted: np.ndarray) -> Metric:
        same = float((reference.argmax(1) == converted.argmax(1)).mean()) - 1
        return Metric(value=same, low=same, high=same)

    return JudgedRows(
        batches=tuple(judged.blocks(7)),
        edges=(judged.block(0, 1),),
        distances=lambda reference, converted: np.abs(reference - converted).max(1),
        change=same_class,
        timing_batch=judged.repeated,
        wording=Wording("a logit", "logits", "", "same class"),
    )


PICTURES = ModelKind("pictures", BOUNDS, _calibration, _judged)


def _program(store: ArtifactStore) -> RegisteredProgram:
    example = torch.zeros(2, 3, 6, 8, dtype=torch.uint8), torch.ones(2)
    batch = torch.export.Dim("batch", min=1, max=256)
    sides = {
        2: torch.export.Dim("height", min=4, max=64),
        3: torch.export.Dim("width", min=4, max=64),
    }
    exported = torch.export.export(
        Pictures().eval(),
        example,
        dynamic_shapes={"image": {0: batch, **sides}, "gain": {0: batch}},
    )
    content = io.BytesIO()
    torch.export.save(exported, content)

    def build(folder: StagedFolder) -> RegisteredProgram:
        (folder.path / "model.pt2").write_bytes(content.getvalue())
        version = ModelVersionRef(
            name="pictures",
            version=1,
            run_id="0" * 32,
            program_sha256=digest_of(folder.path / "model.pt2"),
            snapshot_sha256="0" * 64,
        )
        return RegisteredProgram(
            version=version,
            program=folder.artifact("model.pt2"),
            family=PICTURES.name,
            signature=SIGNATURE,
        )

    return store.build_once("programs", "pictures", RegisteredProgram, build)


def _rows(store: ArtifactStore) -> PreparedRows:
    rng = np.random.default_rng(0)

    def build(folder: StagedFolder) -> PreparedRows:
        arrays = {}
        for part, count in (("calibration", 16), ("judged", 20)):
            arrays[f"{part}_image"] = rng.integers(0, 256, (count, 3, 9, 11), dtype=np.uint8)
            arrays[f"{part}_gain"] = rng.uniform(0.5, 1.5, count).astype(np.float32)
        np.savez(folder.path / "rows.npz", **arrays)
        return PreparedRows(
            data=folder.artifact("rows.npz"), num_calibration=16, num_judged=20, made_from={}
        )

    return store.build_once("pictures", "rows", PreparedRows, build)


@pytest.mark.slow
def test_pictures_go_through_the_same_targets_and_the_same_judge(
    tmp_path: Path, quick: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, PICTURES.name, PICTURES)
    store = ArtifactStore(tmp_path / "artifacts")
    targets = ("onnx-fp32", "openvino-fp32", "openvino-int8", "onnx-int8", "onnx-fp16")
    layers = ("MatMul", "Convolution")
    config = quick.model_copy(update={"formats": targets, "quantized_layers": layers})
    program, rows = _program(store), _rows(store)
    forms = built(program, rows, config, store)
    assert [one.failure for one in forms] == [None] * 5
    variants = judge_variants(program, forms, rows, config, store)
    for variant in variants:
        assert variant.parity_max is not None
        assert variant.parity_max < BOUNDS[variant.precision].max_gap
        assert variant.quality_name == "same class"
    assert "Logits differ from PyTorch by at most" in variants[0].reason
