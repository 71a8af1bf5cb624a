"""A model and rows that nobody here knows, converted by a file that describes them and no code."""

from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from flows.config import read_import_config
from flows.conversion import model_import_flow
from tasks.kernel.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_prefect")]

BATCH = torch.export.Dim("batch", min=1, max=512)
ROWS = 160
DESCRIBED = """
program:
  file: {folder}/theirs.pt2
  signature:
    inputs: [{{name: pixels, dtype: uint8, shape: [batch, 3, 12, 12]}}]
    output: {{name: classes, dtype: float32, shape: [batch, 3]}}
    largest: {{batch: 512}}
rows: {{file: {folder}/rows.parquet}}
registry: {{model_name: theirs, experiment: imports}}
conversion:
  formats: [onnx-fp32, openvino-fp32, openvino-int8, onnx-int8]
  batch_sizes: [1, 16]
  measurement: quick
"""


class SmallPictures(nn.Module):
    """Convolutions over pictures of 12 x 12, pooled to three classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels.float() / 255)


def test_a_classifier_of_pictures_goes_through_by_configuration_alone(
    settings: Settings, tmp_path: Path
) -> None:
    """Program, rows and description are written as somebody elsewhere would."""
    network = SmallPictures().eval()
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 3, 12, 12), dtype=np.uint8)
    with torch.no_grad():
        labels = network(torch.from_numpy(pixels)).argmax(1).numpy()
    example = (torch.from_numpy(pixels[:2]),)
    program = torch.export.export(network, example, dynamic_shapes={"pixels": {0: BATCH}})
    torch.export.save(program, tmp_path / "theirs.pt2")
    parts = ["calibration"] * (ROWS // 2) + ["judged"] * (ROWS // 2)
    table = pa.table({"part": parts, "pixels": pixels.tolist(), "label": labels})
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "theirs.yaml").write_text(DESCRIBED.format(folder=tmp_path))

    result = model_import_flow(read_import_config(tmp_path / "theirs.yaml"))

    assert [variant.quality_name for variant in result.variants] == ["accuracy"] * 4
    assert all(variant.parity_max is not None for variant in result.variants)
    assert all(variant.latencies for variant in result.variants[:2])
    file = settings.store.path(result.variants[0].files) / "model.onnx"
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [answers] = session.run(["classes"], {"pixels": pixels[80:]})
    np.testing.assert_array_equal(answers.argmax(1), labels[80:])
