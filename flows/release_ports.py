"""What a release reaches out to: the server and its edge, and the registry's alias."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module

from flows.config import PipelineConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.standing import find_standing, roll_back
from tasks.release.config import ReleaseConfig
from tasks.release.records import Release
from tasks.release.traffic import Edge, EdgedTraffic, ServerTraffic, Traffic
from tasks.settings import Settings


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """How a use case releases; labels are compared by their kind where nothing else is said."""
    return config.release.of_label(config.features.training_set.task)


def traffic_of(settings: Settings) -> Traffic:
    """Server and edge of an installation; without an edge nothing splits requests."""
    server = ServerTraffic(settings.home)
    if not (settings.home / "edge" / "edge.yaml").exists():
        return server
    edge: Edge = import_module("infra.edge.traffic").EdgeTraffic(settings.home)
    return EdgedTraffic(server, edge)


@dataclass(frozen=True)
class RegistryChampions:
    """The alias `champion`; see `tasks.release.acting.Champions`."""

    settings: Settings

    def champion(self, model: str) -> str | None:
        """Number of the champion; None where there is none."""
        location = RegistryLocation.of(self.settings)
        standing = find_standing(model, location, datetime.now(UTC))
        return None if standing is None else str(standing.version.version)

    def was_restored(self, model: str) -> bool:
        """Whether a roll back made the champion what it is."""
        location = RegistryLocation.of(self.settings)
        standing = find_standing(model, location, datetime.now(UTC))
        return standing is not None and standing.promoted_at is None

    def take_back(self, release: Release, reason: str) -> str:
        """Point the alias at the champion before, under the release's id: once."""
        record = roll_back(
            release.model,
            int(release.candidate),
            reason,
            release.release_id,
            RegistryLocation.of(self.settings),
            datetime.now(UTC),
        )
        return str(record.restored.version)
