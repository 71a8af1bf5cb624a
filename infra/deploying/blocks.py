"""Blocks: what Prefect keeps for us - use cases for `prefect.yaml`, and where people are told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import ObjectNotFound
from pydantic import Field, SecretStr

from infra.deploying.file import UseCase
from infra.deploying.items import MISSING, Comparison, differences
from tasks.kernel.errors import ConfigurationError

FIRST_USE_CASE = "first"

WEBHOOK_VARIABLE = "FALAJ_NOTIFY_WEBHOOK"
SLACK_VARIABLE = "FALAJ_NOTIFY_SLACK"
EMAIL_VARIABLE = "FALAJ_NOTIFY_EMAIL"

HOW_TO_BE_TOLD = (
    f"export {WEBHOOK_VARIABLE}, {SLACK_VARIABLE} or {EMAIL_VARIABLE} and deploy again, or make a "
    "block falaj-webhook, falaj-slack or falaj-email in the UI and deploy again"
)


class UseCaseBlock(Block):
    """The configuration of one use case, as `prefect.yaml` gives it to deployments."""

    _block_type_name = "Use case"
    _block_type_slug = "use-case"
    _description = "The configuration of one use case of Falaj; written by each deploy."

    value: dict[str, Any] = Field(description="The use case's PipelineConfig, whole.")


@dataclass(frozen=True)
class BlockItem:
    """One block as it should be; what it holds is never shown, it may be secret. See `Item`."""

    name: str
    block: Block

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"block {self.block.get_block_type_slug()}/{self.name}"

    async def compare(self, client: PrefectClient) -> Comparison:
        """See `Item`."""
        found = await find_block(client, self.block.get_block_type_slug(), self.name)
        if found is None:
            return Comparison((MISSING,))
        places = {d.split(" ")[0] for d in differences(self._content(), _plain(found.data))}
        return Comparison(tuple(f"{place} is another one" for place in sorted(places)))

    async def write(self, client: PrefectClient) -> None:
        """See `Item`."""
        # On a copy: Prefect writes the block's id into it.
        await self.block.model_copy().save(self.name, overwrite=True, client=client)

    def _content(self) -> dict[str, Any]:
        block_type, schema = UUID(int=0), UUID(int=0)
        document = self.block._to_block_document(
            self.name, schema, block_type, include_secrets=True
        )
        return _plain(document.data)


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """A block's data with its secrets in the open and defaults left out, to be compared alone."""
    shown = {key: _open(value) for key, value in data.items()}
    return {key: value for key, value in shown.items() if value is not None}


def _open(value: Any) -> Any:
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def use_case_block(use_cases: tuple[UseCase, ...]) -> BlockItem:
    """The block that `prefect.yaml` refers to."""
    first = next(use_case for use_case in use_cases if use_case.is_first)
    return BlockItem(FIRST_USE_CASE, UseCaseBlock(value=dict(first.config)))


@dataclass(frozen=True)
class Channel:
    """A way to tell people something."""

    variable: str
    """Environment variable with its address; a secret, so neither argument nor file."""
    slug: str
    """Of its block type."""
    block_name: str
    others: tuple[str, ...] = ()
    """Block types that a person may have chosen in the UI instead."""


CHANNELS = (
    Channel(WEBHOOK_VARIABLE, "custom-webhook", "falaj-webhook"),
    Channel(SLACK_VARIABLE, "custom-webhook", "falaj-slack", ("slack-webhook",)),
    Channel(EMAIL_VARIABLE, "slack-webhook", "falaj-email"),
)
"""Slack's own block posts to Slack's own hosts alone; as a webhook with Slack's JSON the messages
also reach what speaks the same, such as Mattermost. E-mail goes through the block for Slack: that
hands any address that is none of Slack's to Apprise as it is, and Apprise speaks SMTP. An
open-source server has no e-mail block of its own."""


def channel_blocks(environment: Mapping[str, str] | None = None) -> tuple[BlockItem, ...]:
    """Blocks of the channels whose address the environment has.

    Raises:
        ConfigurationError: an address is of another kind. It is not repeated: it is a secret.
    """
    environment = os.environ if environment is None else environment
    return tuple(
        BlockItem(channel.block_name, _channel_block(channel, environment[channel.variable]))
        for channel in CHANNELS
        if environment.get(channel.variable)
    )


def _channel_block(channel: Channel, address: str) -> Block:
    is_email = channel.variable == EMAIL_VARIABLE
    wanted = ("mailto://", "mailtos://") if is_email else ("https://", "http://")
    if not address.startswith(wanted):
        raise ConfigurationError(
            f"{channel.variable} begins with none of {', '.join(wanted)}; expected such as "
            f"{_EXAMPLES[channel.variable]}. Nothing was deployed"
        )
    if is_email:
        return SlackWebhook(url=SecretStr(address))
    return CustomWebhookNotificationBlock.model_validate(
        {
            "name": "Falaj",
            "url": "{{ address }}",
            "json_data": _MESSAGES[channel.variable],
            "secrets": {"address": address},
        }
    )


_MESSAGES = {
    WEBHOOK_VARIABLE: {"subject": "{{ subject }}", "body": "{{ body }}"},
    SLACK_VARIABLE: {"text": "*{{ subject }}*\n{{ body }}"},
}


_EXAMPLES = {
    WEBHOOK_VARIABLE: "https://alerts.example.org/falaj",
    SLACK_VARIABLE: "https://hooks.slack.com/services/T000/B000/XXXX",
    EMAIL_VARIABLE: "mailtos://user:password@smtp.example.org:587?to=team@example.org",
}


async def find_block(client: PrefectClient, slug: str, name: str) -> BlockDocument | None:
    """A block with its secrets; None where there is none."""
    try:
        return await client.read_block_document_by_name(name, slug, include_secrets=True)
    except ObjectNotFound:
        return None


async def channels_there(client: PrefectClient) -> tuple[UUID, ...]:
    """Blocks of the channels that the server has, made by a deploy or by a person in the UI."""
    found = [await _find_channel(client, channel) for channel in CHANNELS]
    return tuple(block.id for block in found if block)


async def _find_channel(client: PrefectClient, channel: Channel) -> BlockDocument | None:
    """Its block of the first type that there is; one message for a channel is enough."""
    for slug in (channel.slug, *channel.others):
        if block := await find_block(client, slug, channel.block_name):
            return block
    return None
