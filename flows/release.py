"""Release: look at the traffic of a new champion - read, compare, decide, act, record."""

from __future__ import annotations

import time
from typing import Annotated

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.config import PipelineConfig
from flows.release_ports import LoggedLabels, RegistryChampions, release_config, traffic_of
from flows.whereabouts import FOUND
from tasks.kernel.settings import Settings
from tasks.release.looking import Look
from tasks.release.records import BY_ITSELF
from tasks.release.task import begin_release, find_open_release, look_at_release, show_release
from tasks.release.traffic import has_server

LOOK_EVERY_S = 60.0


@flow(
    name="release",
    flow_run_name="release-{config.registry.model_name}",
    persist_result=True,
    result_serializer="json",
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
