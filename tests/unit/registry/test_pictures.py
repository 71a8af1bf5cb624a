from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from tasks.kernel.settings import ArtifactStore
from tasks.registry.pictures import draw_pictures
from tests.support.data import builders as shared
from tests.support.registry import builders


@pytest.mark.parametrize("is_empty", [False, True])
def test_pictures_are_drawn_small_and_in_colour_even_of_little_data(
    tmp_path: Path, is_empty: bool
) -> None:
    store = ArtifactStore(tmp_path / "store")
    trained = builders.trained_model(store, shared.dataset(store, shared.frame(300)))
    report = builders.evaluation(store, trained)
    if is_empty:
        trained = trained.model_copy(update={"epochs": trained.epochs[:1], "best_epoch": 0})
        report = report.model_copy(update={"roc": (), "precision_recall": (), "calibration": ()})

    draw_pictures(trained, report, tmp_path / "pictures")

    drawn = sorted((tmp_path / "pictures").iterdir())
    assert [p.name for p in drawn] == ["learning-curve.png", "quality.png"]
    for path in drawn:
        pixels = matplotlib.image.imread(path)[:, :, :3]
        assert (pixels.max(axis=2) - pixels.min(axis=2)).max() > 0.3  # not blank, not grey
        assert path.stat().st_size < 100_000
