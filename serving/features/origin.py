"""Which features a registered model version was trained with, as its own manifest says."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.contracts.data import DatasetSchema, SnapshotPins
from tasks.kernel.errors import RegistryError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import MANIFEST_TAG, Registry
from tasks.registry.records import MANIFEST_FILE


class ModelOrigin(BaseModel):
    """The part of `model.json` that reading the model's features takes.

    Attributes:
        columns: raw inputs in their order; None for a program that takes no table.
        feature_service: that the training set was made with; None for an imported program.
        feature_views: view to the digest of its definition then.
        pins: exact versions; None in models of earlier releases.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    columns: DatasetSchema | None = None
    feature_service: str | None = None
    feature_views: dict[str, str] = {}
    pins: SnapshotPins | None = None


class RegistryOrigins:
    """Origins of model versions from the registry, each checked by digest.

    Opened at the first question; opening takes a second. Questions are asked by one thread.
    """

    def __init__(self, settings: Settings) -> None:
        self._location = RegistryLocation.of(settings)
        self._registry: Registry | None = None

    def __call__(self, model: str, version: str) -> ModelOrigin:
        """What one version was trained with.

        Raises:
            RegistryError: there is no such version, or its manifest is missing or damaged.
            TransientError: the registry is away.
        """
        self._registry = self._registry or Registry(self._location)
        registered = self._registry.version(model, int(version))
        file = registered.folder / MANIFEST_FILE
        expected = registered.tags.get(MANIFEST_TAG)
        if not file.exists() or digest_of(file) != expected:
            raise RegistryError(
                f"{MANIFEST_FILE} of {registered} is missing or not what the registry's digest "
                f"says (in {registered.folder}), so nothing tells which features it takes. Restore "
                "the folder from a backup; entity requests for it are refused"
            )
        try:
            return ModelOrigin.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as exc:
            raise RegistryError(
                f"{MANIFEST_FILE} of {registered} is not what this code writes: {exc}. Entity "
                "requests for it are refused"
            ) from exc
