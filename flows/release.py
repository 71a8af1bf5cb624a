"""Release: compare the traffic of a new champion, act and record; by schedule and by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.config import PipelineConfig
from flows.stages import FOUND, found_but_not_retried
from tasks.contracts.base import TimeWindow
from tasks.contracts.clock import ClockConfig
from tasks.features.task import record_act
from tasks.kernel.settings import Settings
from tasks.predictions.joining import JoinTally, LabelJoin, labels_of_requests
from tasks.predictions.labels import KNOWN_AT
from tasks.predictions.reading import LogQuery
from tasks.registry.approval import VISIBLE
from tasks.registry.connection import RegistryLocation
from tasks.registry.promotion import find_standing, roll_back
from tasks.release.config import ReleaseConfig
from tasks.release.evidence import no_labels
from tasks.release.looking import Look
from tasks.release.records import BY_ITSELF, Release
from tasks.release.task import (
    act_on_release,
    begin_release,
    find_open_release,
    look_at_release,
    show_release,
)
from tasks.release.traffic import Edge, ServerTraffic, Traffic, has_server

if TYPE_CHECKING:
    import pandas as pd


LOOK_EVERY_S = 60.0


@flow(
    name="release",
    flow_run_name="release-{config.registry.model_name}",
    **FOUND,
)
def release_flow(
    config: PipelineConfig, looks: Annotated[int, Field(ge=1, le=60)] = 1
) -> Look | None:
    """Begin the release of a new champion, or look at the one that is open.

    Nothing happens where no serving process is ready, and where the champion serves already; then
    the run ends at once. While a release is open, one process looks each minute: it would cost far
    more to start one for each look.

    Args:
        config: The use case; its `release` says in which steps and on what evidence.
        looks: So many at most, a minute apart, while a release is open.

    Returns:
        What the last look found; None where no release was open.

    Raises:
        TransientError: server, edge, registry or database did not answer; what was decided is
            carried out by the next run.
    """
    found = look_once(config)
    for _ in range(looks - 1):
        if find_open_release(config.registry.model_name) is None:
            break
        time.sleep(LOOK_EVERY_S)
        found = look_once(config)
    return found


def look_once(config: PipelineConfig) -> Look | None:
    """Begin what is due, or look at what is open."""
    settings = Settings.from_environment()
    if not has_server(settings.home):
        get_run_logger().info("no serving process is ready, so there is no traffic to move")
        return None
    ports = traffic_of(settings), RegistryChampions(settings)
    model = config.registry.model_name
    release = find_open_release(model)
    if release is None:
        begun = begin_release(model, release_config(config), *ports, BY_ITSELF, only_if_due=True)
        if begun is not None:
            show_release(begun)
        return None
    seen = look_at_release(release, *ports, LoggedLabels(settings.home, config.clock))
    show_release(seen.release)
    return seen


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """How a use case releases; labels are compared by their kind where nothing else is said."""
    return config.release.of_label(config.features.training_set.task)


def traffic_of(settings: Settings) -> Traffic:
    """Server and edge of an installation; without an edge nothing splits requests."""
    edge: Edge | None = None
    if (settings.home / "edge" / "edge.yaml").exists():
        edge = import_module("infra.gateway.prepare").GatewayTraffic(settings.home)
    return ServerTraffic(settings.home, edge)


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
        """Labels of the rows of all three tracks that are known now; one of each pair.

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


ACTION = "change-release"
Wish = Literal["start", "promote", "hold", "resume", "roll_back"]


@flow(
    name="release-by-hand",
    flow_run_name="{action}-{config.registry.model_name}",
    **found_but_not_retried("a person's step would be taken twice"),
)
def release_by_hand_flow(
    action: Wish,
    approver: Annotated[str, Field(min_length=1, max_length=200, pattern=VISIBLE)],
    config: PipelineConfig,
    comment: Annotated[str, Field(max_length=2000)] = "",
) -> Release | None:
    """Start, promote, hold, resume or roll back the release of a model, under a person's name.

    Args:
        action: start: release the champion, also one that was rolled back before. promote: go to
            the next step now, or end the release after the last one. hold: no further step until
            it is resumed; a version that does harm is still rolled back. resume: take the hold
            away. roll_back: all traffic goes back to the version before, and so does the alias.
        approver: Your name, as it is to be recorded with the release and in the audit trail.
        config: The use case.
        comment: Why, for those who read it later; may be empty.

    Raises:
        DataContractError: there is nothing to release, or no release is open.
        TransientError: server, edge, registry or database did not answer.
    """
    settings = Settings.from_environment()
    ports = traffic_of(settings), RegistryChampions(settings)
    model = config.registry.model_name
    record_act(ACTION, action, {"model": model}, approver)
    if action == "start":
        release = begin_release(
            model, release_config(config), *ports, approver, only_if_due=False, comment=comment
        )
    else:
        seen = find_open_release(model)
        release = act_on_release(model, action, approver, comment, *ports, seen)
    if release is not None:
        show_release(release)
    return release
