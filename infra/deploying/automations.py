"""Automations: a drift result starts a decision, and people are notified of what concerns them.

They are defined here and not under `triggers:` in `prefect.yaml`: those are deleted and made anew
at each deploy, and forget their cooldown. One that is equal is left alone, so its cooldown goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.events.actions import ActionTypes, RunDeployment, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from infra.deploying.blocks import channels_there
from infra.deploying.deployments import OWN_TAG, read_deployment
from infra.deploying.items import Comparison, Found, Item

DECISION_DEPLOYMENT = "decision/decision"

COOLDOWN_S = 300
"""Further results on one model start no decision within this. It only saves work: the controller's
claims keep one incident from being answered twice, and its sweep, which runs as often, finds what
was passed over here."""


class Notification(BaseModel):
    """One thing that people are notified of.

    Attributes:
        expect: events that cause it.
        match: labels of the event's resource; one of several values is enough.
        subject: Jinja, one line.
        body: Jinja, plain text that is readable Markdown too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Kebab-case; unique.")
    expect: frozenset[str]
    match: Mapping[str, str | list[str]]
    subject: str
    body: str
    quiet_s: int = 0

    @property
    def automation_name(self) -> str:
        """Name of the automation that sends it.

        All begin alike, so that the one about failed actions can pass over its own kind: a message
        that could not be sent must not cause a message that cannot be sent.
        """
        return f"notify-{self.name}"


@cache
def notifications() -> tuple[Notification, ...]:
    """All of the file."""
    content = Path(__file__).with_name("notifications.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Notification, ...]).validate_python(yaml.safe_load(content))


def notification(name: str) -> Notification:
    """The one of that name."""
    return next(found for found in notifications() if found.name == name)


@dataclass(frozen=True, kw_only=True)
class AutomationItem(Item):
    """One automation.

    Attributes:
        actions: asks the server for the ids of deployments and blocks that its actions name.
        expect: events that fire it.
        match: labels of an event's resource.
        quiet_s: no second one of the same resource counts within this.
    """

    name: str
    description: str
    actions: Callable[[PrefectClient], Any]
    expect: frozenset[str]
    match: Mapping[str, str | list[str]]
    quiet_s: int

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"automation {self.name}"

    async def wanted(self, client: PrefectClient) -> dict[str, Any]:
        """See `Item`."""
        return _view(await self._core(client))

    async def found(self, client: PrefectClient) -> Found | None:
        """See `Item`."""
        found = await self._there(client)
        if not found:
            return None
        paused = () if found[0].enabled else ("it is off",)
        more = {"others of this name": len(found) - 1} if found[1:] else {}
        return Found(_view(found[0]) | more, paused)

    async def compare(self, client: PrefectClient) -> Comparison:
        """See `Item`. One that would do nothing is not made."""
        if await self.actions(client):
            return await super().compare(client)
        there = await self._there(client)
        return Comparison(("it does nothing any more and is removed",) if there else ())

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        core, there = await self._core(client), await self._there(client)
        kept = there[0] if there and core.actions else None
        for other in there:
            if other is not kept:
                await client.delete_automation(other.id)
        if kept is not None:
            enabled = self.resume or kept.enabled
            await client.update_automation(kept.id, core.model_copy(update={"enabled": enabled}))
        elif core.actions:
            await client.create_automation(core)

    async def _there(self, client: PrefectClient) -> list[Automation]:
        """Automations of exactly this name; the oldest first."""
        found = await client.read_automations_by_name(self.name)
        return sorted((a for a in found if a.name == self.name), key=lambda a: str(a.id))

    async def _core(self, client: PrefectClient) -> AutomationCore:
        return AutomationCore(
            name=self.name,
            description=self.description,
            enabled=True,
            tags=[OWN_TAG],
            trigger=EventTrigger(
                expect=set(self.expect),
                match=dict(self.match),
                for_each={"prefect.resource.id"} if self.quiet_s else set(),
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(seconds=self.quiet_s),
            ),
            actions=await self.actions(client),
            actions_on_trigger=[],
            actions_on_resolve=[],
        )


def decide_on_drift(*, cooldown_s: int = COOLDOWN_S, resume: bool = False) -> AutomationItem:
    """The automation that starts a decision for a drift result."""

    async def actions(client: PrefectClient) -> list[ActionTypes]:
        deployment = await read_deployment(client, DECISION_DEPLOYMENT)
        if deployment is None:
            return []
        result = {"result_id": "{{ event.payload.verdict_id }}"}
        start = {"source": "selected", "deployment_id": deployment.id, "parameters": result}
        return [RunDeployment.model_validate(start)]

    return AutomationItem(
        resume=resume,
        name="decide-on-drift",
        description="A drift result on a model starts a decision, at once and then not again for "
        f"{cooldown_s} s; the controller's sweep finds what is passed over.",
        actions=actions,
        expect=frozenset({"falaj.drift.judged"}),
        match={"prefect.resource.id": "falaj.model.*"},
        quiet_s=cooldown_s,
    )


def notify(notification: Notification, *, resume: bool = False) -> AutomationItem:
    """The automation that notifies people of something, through every channel that there is."""

    async def actions(client: PrefectClient) -> list[ActionTypes]:
        subject, body = notification.subject, notification.body
        return [
            SendNotification(block_document_id=block, subject=subject, body=body)
            for block in await channels_there(client)
        ]

    return AutomationItem(
        resume=resume,
        name=notification.automation_name,
        description="Notifies people, and says what to do next.",
        actions=actions,
        expect=notification.expect,
        match=notification.match,
        quiet_s=notification.quiet_s,
    )


def automation_items(*, resume: bool = False) -> tuple[AutomationItem, ...]:
    """All automations."""
    notices = (notify(each, resume=resume) for each in notifications())
    return (decide_on_drift(resume=resume), *notices)


def _view(automation: AutomationCore) -> dict[str, Any]:
    """All that is compared, as JSON; sets in one order, and without what the server adds."""
    core = AutomationCore.model_validate(automation.model_dump(), extra="ignore")
    shown: dict[str, Any] = core.model_dump(mode="json", exclude={"enabled": True})
    trigger = shown["trigger"]
    trigger.pop("id", None)
    for name in ("expect", "after", "for_each"):
        trigger[name] = sorted(trigger[name])
    return shown
