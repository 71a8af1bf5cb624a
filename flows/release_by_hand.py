"""Release by hand: what a person wants with a release, from a form in the Prefect UI."""

from __future__ import annotations

from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from flows.config import PipelineConfig
from flows.release_ports import RegistryChampions, release_config, traffic_of
from flows.whereabouts import found_but_not_retried
from tasks.features.task import record_act
from tasks.kernel.settings import Settings
from tasks.registry.approval import VISIBLE
from tasks.release.records import Release
from tasks.release.task import act_on_release, begin_release, find_open_release, show_release

ACTION = "change-release"
Wish = Literal["start", "promote", "hold", "resume", "roll_back"]


@flow(
    name="release-by-hand",
    flow_run_name="{action}-{config.registry.model_name}",
    persist_result=True,
    result_serializer="json",
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
