"""What a release reaches out to: server and edge, the registry's alias, and known labels."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from flows.clock import ClockConfig
from flows.config import PipelineConfig
from tasks.contracts.base import TimeWindow
from tasks.kernel.settings import Settings
from tasks.predictions.joining import JoinTally, LabelJoin
from tasks.predictions.labels import KNOWN_AT
from tasks.predictions.reading import LogQuery
from tasks.predictions.request_labels import labels_of_requests
from tasks.registry.connection import RegistryLocation
from tasks.registry.standing import find_standing, roll_back
from tasks.release.config import ReleaseConfig
from tasks.release.evidence import no_labels
from tasks.release.records import Release
from tasks.release.traffic import Edge, EdgedTraffic, ServerTraffic, Traffic

if TYPE_CHECKING:
    import pandas as pd


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """How a use case releases; labels are compared by their kind where nothing else is said."""
    return config.release.of_label(config.features.training_set.task)


def traffic_of(settings: Settings) -> Traffic:
    """Server and edge of an installation; without an edge nothing splits requests."""
    server = ServerTraffic(settings.home)
    if not (settings.home / "edge" / "edge.yaml").exists():
        return server
    edge: Edge = import_module("infra.gateway.prepare").GatewayTraffic(settings.home)
    return EdgedTraffic(server, edge)


@dataclass(frozen=True)
class LoggedLabels:
    """Imported labels, joined with the log; see `tasks.release.evidence.Labels`.

    Attributes:
        home: state folder.
        clock: of the use case; where recorded data is played, labels that name entities are in its
            time, and how far that lies from the server's does not change during a release.
    """

    home: Path
    clock: ClockConfig

    def of_release(self, release: Release, now: datetime) -> pd.DataFrame:
        """Labels of the rows of all three slots that are known now; one of each pair.

        Raises:
            DataContractError: a table of labels is damaged, or there are too many.
        """
        settle, start = timedelta(seconds=release.config.settle_s), release.opened_at
        if now - settle <= start:
            return no_labels()
        query = LogQuery(
            release.model,
            TimeWindow(start=start, end=now - settle),
            versions=(release.stable, release.candidate),
        )
        shift = self.clock.shows(start) - start
        join = LabelJoin(self.home, query, now, JoinTally(), shift=shift)
        known = labels_of_requests(self.home, join, seen_after=settle)
        return known.rename(columns={KNOWN_AT: "labelled_at"})


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
