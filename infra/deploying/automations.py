"""Automations: a drift result starts a decision, and people are notified of what concerns them.

They are defined here and not under `triggers:` in `prefect.yaml`: those are deleted and made anew
at each deploy, and forget their cooldown. One that is equal is left alone, so its cooldown goes on.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import PrefectClient
from prefect.events.actions import ActionTypes, RunDeployment, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from pydantic import Field, SecretStr, TypeAdapter

from infra.deploying.deployments import OWN_TAG, read_deployment
from infra.deploying.items import BlockItem, Comparison, Found, Item, find_block
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.values import Contract

COOLDOWN_S = 300
"""Further results on one model start no decision within this. It only saves work: the controller's
claims keep one incident from being answered twice, and its sweep, which runs as often, finds what
was passed over here."""


class Notification(Contract):
    """One thing that people are notified of.

    Attributes:
        expect: events that cause it.
        match: labels of the event's resource; one of several values is enough.
        subject: Jinja, one line.
        body: Jinja, plain text that is readable Markdown too.
    """

    name: str = Field(description="Kebab-case; unique.")
    expect: frozenset[str]
    match: Mapping[str, str | list[str]]
    subject: str
    body: str
    quiet_s: int = 0


@dataclass(frozen=True)
class Channel:
    """A way to notify people.

    Attributes:
        variable: environment variable with its address; a secret, so neither argument nor file.
        slug: of its block type.
        example: of an address; another one begins in the same way.
        message: what a webhook is sent; None: Slack's own block sends it.
        others: block types that a person may have chosen in the UI instead.
    """

    variable: str
    slug: str
    block_name: str
    example: str
    message: Mapping[str, str] | None = None
    others: tuple[str, ...] = ()

    def block(self, address: str) -> Block:
        """The block with this address.

        Raises:
            ConfigurationError: it is of another kind. It is not repeated: it is a secret.
        """
        kind = self.example.partition("://")[0].rstrip("s")
        if not address.startswith((f"{kind}://", f"{kind}s://")):
            raise ConfigurationError(
                f"{self.variable} does not begin with {kind}:// or {kind}s://; expected such as "
                f"{self.example}. Nothing was deployed"
            )
        if self.message is None:
            return SlackWebhook(url=SecretStr(address))
        told = {"name": "Falaj", "url": "{{ address }}", "json_data": self.message}
        secret = {"secrets": {"address": address}}
        return CustomWebhookNotificationBlock.model_validate({**told, **secret})


CHANNELS = (
    Channel(
        "FALAJ_NOTIFY_WEBHOOK",
        "custom-webhook",
        "falaj-webhook",
        "https://alerts.example.org/falaj",
        {"subject": "{{ subject }}", "body": "{{ body }}"},
    ),
    Channel(
        "FALAJ_NOTIFY_SLACK",
        "custom-webhook",
        "falaj-slack",
        "https://hooks.slack.com/services/T000/B000/XXXX",
        {"text": "*{{ subject }}*\n{{ body }}"},
        others=("slack-webhook",),
    ),
    Channel(
        "FALAJ_NOTIFY_EMAIL",
        "slack-webhook",
        "falaj-email",
        "mailtos://user:password@smtp.example.org:587?to=team@example.org",
    ),
)
"""Slack's own block posts to Slack's own hosts alone; as a webhook with Slack's JSON the messages
also reach what speaks the same, such as Mattermost. E-mail goes through the block for Slack: that
hands any address that is none of Slack's to Apprise as it is, and Apprise speaks SMTP. An
open-source server has no e-mail block of its own."""

HOW_TO_BE_TOLD = (
    f"export {' or '.join(c.variable for c in CHANNELS)} and deploy again, or make a block "
    "falaj-webhook, falaj-slack or falaj-email in the UI and deploy again"
)


def channel_blocks(environment: Mapping[str, str] = os.environ) -> tuple[BlockItem, ...]:
    """Blocks of the channels whose address the environment has.

    Raises:
        ConfigurationError: an address is of another kind.
    """
    return tuple(
        BlockItem(name=channel.block_name, block=channel.block(address))
        for channel in CHANNELS
        if (address := environment.get(channel.variable))
    )


async def channels_there(client: PrefectClient) -> tuple[UUID, ...]:
    """Blocks of the channels that the server has, made by a deploy or by a person in the UI.

    Of each channel the block of the first type that there is; one message is enough.
    """
    there = []
    for channel in CHANNELS:
        for slug in (channel.slug, *channel.others):
            if block := await find_block(client, slug, channel.block_name):
                there.append(block.id)
                break
    return tuple(there)


@cache
def notifications() -> tuple[Notification, ...]:
    """All of the file."""
    content = Path(__file__).with_name("notifications.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Notification, ...]).validate_python(yaml.safe_load(content))


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


def decide_on_drift(*, cooldown_s: int = COOLDOWN_S) -> AutomationItem:
    """The automation that starts a decision for a drift result."""

    async def actions(client: PrefectClient) -> list[ActionTypes]:
        deployment = await read_deployment(client, "decision/decision")
        if deployment is None:
            return []
        result = {"result_id": "{{ event.payload.verdict_id }}"}
        start = {"source": "selected", "deployment_id": deployment.id, "parameters": result}
        return [RunDeployment.model_validate(start)]

    return AutomationItem(
        name="decide-on-drift",
        description="A drift result on a model starts a decision, at once and then not again for "
        f"{cooldown_s} s; the controller's sweep finds what is passed over.",
        actions=actions,
        expect=frozenset({"falaj.drift.judged"}),
        match={"prefect.resource.id": "falaj.model.*"},
        quiet_s=cooldown_s,
    )


def notify(notification: Notification) -> AutomationItem:
    """The automation that notifies people of something, through every channel that there is."""

    async def actions(client: PrefectClient) -> list[ActionTypes]:
        subject, body = notification.subject, notification.body
        return [
            SendNotification(block_document_id=block, subject=subject, body=body)
            for block in await channels_there(client)
        ]

    return AutomationItem(
        # All begin alike, so that the one about failed actions can pass over its own kind: a
        # message that could not be sent must not cause a message that cannot be sent.
        name=f"notify-{notification.name}",
        description="Notifies people, and says what to do next.",
        actions=actions,
        expect=notification.expect,
        match=notification.match,
        quiet_s=notification.quiet_s,
    )


def _view(automation: AutomationCore) -> dict[str, Any]:
    """All that is compared, as JSON; sets in one order, and without what the server adds."""
    core = AutomationCore.model_validate(automation.model_dump(), extra="ignore")
    shown: dict[str, Any] = core.model_dump(mode="json", exclude={"enabled": True})
    trigger = shown["trigger"]
    trigger.pop("id", None)
    for name in ("expect", "after", "for_each"):
        trigger[name] = sorted(trigger[name])
    return shown
