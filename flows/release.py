"""Release: compare the traffic of a new champion, act and record; by schedule and by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import pyarrow as pa
from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.config import PipelineConfig
from flows.stages import FOUND, found_but_not_retried
from tasks.contracts.base import TimeWindow
from tasks.contracts.clock import ClockConfig
from tasks.contracts.release import ChampionState
from tasks.features.task import record_act
from tasks.governance.identity import read_sign_in
from tasks.kernel.errors import AccessError, DataContractError
from tasks.kernel.settings import Settings
from tasks.predictions.labels import KNOWN_AT, JoinTally, LabelJoin, labels_of_requests
from tasks.predictions.reading import LogQuery, ReadTally, read_rows
from tasks.predictions.schema import FIXED
from tasks.registry.approval import VISIBLE
from tasks.registry.connection import RegistryLocation
from tasks.registry.promotion import find_champion_state, roll_back
from tasks.release.config import ReleaseConfig
from tasks.release.evidence import COLUMNS, no_labels
from tasks.release.ledger import ReleaseLedger
from tasks.release.records import BY_ITSELF, Release
from tasks.release.rollout import Cycle
from tasks.release.task import act_on_release, begin_release, evaluate_release, find_open_release
from tasks.release.traffic import Gateway, ServerTraffic, Traffic, has_server
from tasks.reporting.task import show_release

CYCLE_S = 60.0


@flow(name="release", flow_run_name="release-{config.registry.model_name}", **FOUND)
def release_flow(
    config: PipelineConfig, cycles: Annotated[int, Field(ge=1, le=60)] = 1
) -> Cycle | None:
    """Begin the release of a new champion, or evaluate the one that is open.

    Nothing happens where no serving process is ready, and where the champion serves already; then
    the run ends at once. While a release is open, one process evaluates it each minute: it would
    cost far more to start one for each cycle.

    Args:
        config: The use case; its `release` says in which steps and on what evidence.
        cycles: So many at most, a minute apart, while a release is open.

    Returns:
        What the last cycle found; None where no release was open.

    Raises:
        TransientError: server, gateway, registry or database did not answer; what was decided is
            carried out by the next run.
    """
    found = run_cycle(config)
    for _ in range(cycles - 1):
        if find_open_release(config.registry.model_name) is None:
            break
        time.sleep(CYCLE_S)
        found = run_cycle(config)
    return found


def run_cycle(config: PipelineConfig) -> Cycle | None:
    """Begin what is due, or evaluate what is open."""
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
            show(begun)
        return None
    cycle = evaluate_release(release, *ports, LoggedRequests(settings.home, config.clock))
    show(cycle.release)
    return cycle


def show(release: Release) -> None:
    """Write the release's page."""
    ledger = ReleaseLedger(Settings.from_environment().metadata_url)
    show_release(release.summary, tuple(ledger.entries(release.release_id)))


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """How a use case releases; labels are compared by their kind where nothing else is said."""
    return config.release.of_label(config.features.training_set.task)


def traffic_of(settings: Settings) -> Traffic:
    """Server and gateway of an installation; without a gateway nothing splits requests."""
    gateway: Gateway | None = None
    if (settings.home / "edge" / "edge.yaml").exists():
        gateway = import_module("infra.gateway.prepare").GatewayTraffic(settings.home)
    return ServerTraffic(settings.home, gateway)


@dataclass(frozen=True)
class LoggedRequests:
    """The prediction log joined with imported labels; see `tasks.release.evidence.RequestLog`.

    Attributes:
        home: state folder.
        clock: of the use case; where recorded data is played, labels that name entities are in its
            time, and how far that lies from the server's does not change during a release.
    """

    home: Path
    clock: ClockConfig

    def rows(self, release: Release, until: datetime) -> pa.Table:
        """Rows of both versions since the release began.

        Raises:
            DataContractError: a segment of the log is damaged.
        """
        tally, query = ReadTally(), _query(release, until)
        tables = list(read_rows(self.home, query, COLUMNS, tally=tally)) if query else []
        if tally.damaged:
            raise DataContractError(f"{tally.damaged[0]}. Nothing was decided")
        empty = pa.schema([FIXED.field(name) for name in COLUMNS]).empty_table()
        return pa.concat_tables([*tables, empty], promote_options="permissive")

    def labels(self, release: Release, now: datetime) -> pd.DataFrame:
        """Labels of the rows of all three tracks that are known now; one of each pair.

        Raises:
            DataContractError: a table of labels is damaged, or there are too many.
        """
        settle = timedelta(seconds=release.config.settle_s)
        query = _query(release, now - settle)
        if query is None:
            return no_labels()
        shift = self.clock.shows(release.opened_at) - release.opened_at
        join = LabelJoin(self.home, replace(query, answered=True), now, JoinTally(), shift=shift)
        known = labels_of_requests(self.home, join, seen_after=settle)
        return known.rename(columns={KNOWN_AT: "labelled_at"})


def _query(release: Release, until: datetime) -> LogQuery | None:
    """Rows of both versions, answered and refused; None before the first can be there."""
    if until <= release.opened_at:
        return None
    window = TimeWindow(start=release.opened_at, end=until)
    return LogQuery(release.model, window, (release.stable, release.candidate), answered=None)


@dataclass(frozen=True)
class RegistryChampions:
    """The alias `champion`; see `tasks.release.rollout.Champions`."""

    settings: Settings

    def champion(self, model: str) -> str | None:
        """Number of the champion; None where there is none."""
        found = self._state(model)
        return None if found is None else str(found.version.version)

    def was_restored(self, model: str) -> bool:
        """Whether a roll back made the champion what it is."""
        found = self._state(model)
        return found is not None and found.promoted_at is None

    def _state(self, model: str) -> ChampionState | None:
        return find_champion_state(model, RegistryLocation.of(self.settings), datetime.now(UTC))

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


@flow(
    name="release-by-hand",
    flow_run_name="{action}-{config.registry.model_name}",
    **found_but_not_retried("a person's step would be taken twice"),
)
def release_by_hand_flow(
    action: Literal["start", "promote", "hold", "resume", "roll_back"],
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
        AccessError: people sign in here, so that a typed name does not count.
        DataContractError: there is nothing to release, or no release is open.
        TransientError: server, gateway, registry or database did not answer.
    """
    settings = Settings.from_environment()
    if read_sign_in(settings.home) is not None:
        raise AccessError(
            f"the name {approver!r} was typed, and people sign in here: run `falaj release "
            f"{action.replace('_', '')}` under your own. Nothing was changed"
        )
    ports = traffic_of(settings), RegistryChampions(settings)
    model = config.registry.model_name
    record_act(ACTION, action, {"model": model}, approver)
    if action == "start":
        release = begin_release(
            model, release_config(config), *ports, approver, only_if_due=False, comment=comment
        )
    else:
        release = act_on_release(model, action, approver, comment, *ports, find_open_release(model))
    if release is not None:
        show(release)
    return release
