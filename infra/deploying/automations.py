"""Automations: a drift result starts a decision, and people are told of what concerns them.

They stand here and not under `triggers:` in `prefect.yaml`: those are deleted and made anew at each
deploy, and forget their cooldown. One that is equal is left alone, so its cooldown goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.events.actions import ActionTypes, RunDeployment, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from infra.deploying.blocks import channels_there
from infra.deploying.deployments import OWN_TAG, find_id
from infra.deploying.items import MISSING, Comparison, differences
from tasks.kernel.errors import TransientError

DECISION_DEPLOYMENT = "decision/decision"
DECIDE_ON_DRIFT = "decide-on-drift"

COOLDOWN_S = 300
"""Further results on one model start no decision within this. It only saves work: the controller's
claims keep one episode from being answered twice, and its sweep, which runs as often, finds what
was passed over here."""


AUTOMATION_PREFIX = "notify-"
"""Names of the automations begin with it, so that the one about failed actions can pass over its
own kind: a message that could not be sent must not cause a message that cannot be sent."""


class Notification(BaseModel):
    """One thing that people are told about."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Kebab-case; unique.")
    expect: frozenset[str] = Field(description="Events that cause it.")
    match: Mapping[str, str | tuple[str, ...]] = Field(
        description="Labels of the event's resource; one of several values is enough."
    )
    subject: str = Field(description="Jinja, one line.")
    body: str = Field(description="Jinja, plain text that is readable Markdown too.")
    quiet_s: int = 0

    @property
    def automation_name(self) -> str:
        """Name of the automation that sends it."""
        return AUTOMATION_PREFIX + self.name


@cache
def notifications() -> tuple[Notification, ...]:
    """All of the file."""
    content = Path(__file__).with_name("notifications.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Notification, ...]).validate_python(yaml.safe_load(content))


def notification(name: str) -> Notification:
    """The one of that name."""
    return next(found for found in notifications() if found.name == name)


@dataclass(frozen=True)
class AutomationItem:
    """One automation as it should be. See `infra.deploying.items.Item`."""

    name: str
    description: str
    trigger: EventTrigger
    actions: Callable[[PrefectClient], Any]
    """Gives its actions; they name deployments and blocks by id, which only the server knows."""
    resume: bool = False

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"automation {self.name}"

    async def compare(self, client: PrefectClient) -> Comparison:
        """See `Item`."""
        wanted = await self._wanted(client)
        found = await _read(client, self.name)
        if wanted is None:
            return Comparison(("what it would start is missing",))
        if not wanted.actions:
            gone = ("it tells nobody any more and is removed",) if found else ()
            return Comparison(tuple(gone))
        if not found:
            return Comparison((MISSING,))
        faults = list(differences(_view(wanted), _view(found[0])))
        faults += ["there is more than one of this name"] * (len(found) > 1)
        if found[0].enabled:
            return Comparison(tuple(faults))
        if self.resume:
            return Comparison((*faults, "it is off"))
        note = "it is off, by a person; --resume switches it on"
        return Comparison(tuple(faults), (note,))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        wanted = await self._wanted(client)
        if wanted is None:
            raise TransientError(
                f"{self.label}: what it would start was not there when it was written; deploy again"
            )
        kept, *others = [*await _read(client, self.name), None]
        if kept is None:
            await client.create_automation(wanted)
            return
        for other in others:
            if other is not None:
                await client.delete_automation(other.id)
        if not wanted.actions:
            await client.delete_automation(kept.id)
            return
        enabled = True if self.resume else kept.enabled
        await client.update_automation(kept.id, wanted.model_copy(update={"enabled": enabled}))

    async def _wanted(self, client: PrefectClient) -> AutomationCore | None:
        actions = await self.actions(client)
        if actions is None:
            return None
        return AutomationCore(
            name=self.name,
            description=self.description,
            enabled=True,
            tags=[OWN_TAG],
            trigger=self.trigger,
            actions=actions,
            actions_on_trigger=[],
            actions_on_resolve=[],
        )


def decide_on_drift(*, cooldown_s: int = COOLDOWN_S, resume: bool = False) -> AutomationItem:
    """The automation that starts a decision for a drift result."""

    async def actions(client: PrefectClient) -> list[ActionTypes] | None:
        deployment = await find_id(client, DECISION_DEPLOYMENT)
        if deployment is None:
            return None
        result = {"result_id": "{{ event.payload.verdict_id }}"}
        start = {"source": "selected", "deployment_id": deployment, "parameters": result}
        return [RunDeployment.model_validate(start)]

    return AutomationItem(
        name=DECIDE_ON_DRIFT,
        description="A drift result on a model starts a decision, at once and then not again for "
        f"{cooldown_s} s; the controller's sweep finds what is passed over.",
        trigger=_trigger(
            {"falaj.drift.judged"}, {"prefect.resource.id": "falaj.model.*"}, cooldown_s
        ),
        actions=actions,
        resume=resume,
    )


def notify(notification: Notification, *, resume: bool = False) -> AutomationItem:
    """The automation that tells people of something, through every channel that there is."""

    async def actions(client: PrefectClient) -> list[ActionTypes]:
        return [
            SendNotification(
                block_document_id=block, subject=notification.subject, body=notification.body
            )
            for block in await channels_there(client)
        ]

    match = {k: list(v) if isinstance(v, tuple) else v for k, v in notification.match.items()}
    return AutomationItem(
        name=notification.automation_name,
        description="Tells people, and what to do next.",
        trigger=_trigger(notification.expect, match, notification.quiet_s),
        actions=actions,
        resume=resume,
    )


def automation_items(*, resume: bool = False) -> tuple[AutomationItem, ...]:
    """All automations."""
    notices = (notify(each, resume=resume) for each in notifications())
    return (decide_on_drift(resume=resume), *notices)


async def leftover_automations(
    client: PrefectClient, items: Iterable[AutomationItem]
) -> dict[str, UUID]:
    """Automations of this project's own that it no longer writes: name to id."""
    names = {item.name for item in items}
    return {
        found.name: found.id
        for found in await client.read_automations(limit=200)
        if OWN_TAG in found.tags and found.name not in names
    }


def _trigger(
    expect: Iterable[str], match: dict[str, str] | dict[str, str | list[str]], quiet_s: int
) -> EventTrigger:
    """Fires at the first event, and is then deaf for `quiet_s` to those of the same resource."""
    return EventTrigger(
        expect=set(expect),
        match=dict(match),
        for_each={"prefect.resource.id"} if quiet_s else set(),
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(seconds=quiet_s),
    )


def _view(automation: AutomationCore) -> dict[str, Any]:
    """All that is compared, as JSON; sets in one order, and without what the server adds."""
    shown: dict[str, Any] = AutomationCore.model_validate(
        automation.model_dump(), extra="ignore"
    ).model_dump(mode="json", exclude={"enabled"})
    trigger = shown["trigger"]
    trigger.pop("id", None)
    for name in ("expect", "after", "for_each"):
        trigger[name] = sorted(trigger[name])
    return shown


async def _read(client: PrefectClient, name: str) -> list[Automation]:
    """Automations of exactly this name; the oldest first."""
    found = await client.read_automations_by_name(name)
    return sorted((a for a in found if a.name == name), key=lambda a: str(a.id))
