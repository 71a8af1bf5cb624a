"""What a version was trained with, from a real registry, checked by digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.features.recipe import registry_origins
from tasks.kernel.errors import RegistryError
from tasks.kernel.settings import Settings
from tasks.registry.mlflow_registry import Registry
from tasks.registry.model_folder import MANIFEST_FILE
from tests.support.data.builders import COLUMNS
from tests.support.registry.builders import World, draw_nothing


def test_a_manifest_says_the_service_and_a_changed_one_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.registry.pictures.draw_pictures", draw_nothing)
    world = World.at(tmp_path)
    ref, _ = world.register()
    origins = registry_origins(Settings(home=tmp_path, feature_repo=tmp_path))
    origin = origins(ref.name, str(ref.version))
    assert origin.feature_service == "flight_delay_v1"
    assert origin.feature_views == {"carrier_stats": "0" * 32}
    assert origin.columns == COLUMNS
    with pytest.raises(RegistryError, match="version 9 is not in the registry"):
        origins(ref.name, "9")
    registered = Registry(world.location).version(ref.name, ref.version)
    (registered.folder / MANIFEST_FILE).write_text("{}")
    with pytest.raises(RegistryError, match="has SHA-256"):
        origins(ref.name, str(ref.version))
