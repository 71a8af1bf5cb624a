"""Blocks: what Prefect keeps for us - use cases for `prefect.yaml`, and where people are told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import ObjectNotFound
from pydantic import Field, SecretStr

from infra.deploying.file import UseCase
from infra.deploying.items import Found, Item
from tasks.kernel.errors import ConfigurationError


class UseCaseBlock(Block):
    """The configuration of one use case, as `prefect.yaml` gives it to deployments."""

    _block_type_name = "Use case"
    _block_type_slug = "use-case"
    _description = "The configuration of one use case of Falaj; written by each deploy."

    value: dict[str, Any] = Field(description="The use case's PipelineConfig, whole.")


@dataclass(frozen=True, kw_only=True)
class BlockItem(Item):
    """One block; what it holds is never shown, it may be secret."""

    name: str
    block: Block
    is_secret: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """See `Item`."""
        return f"block {self.block.get_block_type_slug()}/{self.name}"

    async def wanted(self, client: PrefectClient) -> dict[str, Any]:
        """See `Item`."""
        nowhere = UUID(int=0)
        return _plain(
            self.block._to_block_document(self.name, nowhere, nowhere, include_secrets=True).data
        )

    async def found(self, client: PrefectClient) -> Found | None:
        """See `Item`."""
        found = await find_block(client, self.block.get_block_type_slug(), self.name)
        return Found(_plain(found.data)) if found else None

    async def write(self, client: PrefectClient) -> None:
        """See `Item`. On a copy: Prefect writes the block's id into it."""
        await self.block.model_copy().save(self.name, overwrite=True, client=client)


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """A block's data with its secrets in the open and defaults left out, to be compared alone."""
    shown = {
        key: value.get_secret_value() if isinstance(value, SecretStr) else value
        for key, value in data.items()
    }
    return {key: value for key, value in shown.items() if value is not None}


def use_case_block(use_cases: tuple[UseCase, ...]) -> BlockItem:
    """The block that `prefect.yaml` refers to."""
    return BlockItem(name="first", block=UseCaseBlock(value=dict(use_cases[0].config)))


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
        return CustomWebhookNotificationBlock.model_validate(
            {
                "name": "Falaj",
                "url": "{{ address }}",
                "json_data": self.message,
                "secrets": {"address": address},
            }
        )


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


def channel_blocks(environment: Mapping[str, str] | None = None) -> tuple[BlockItem, ...]:
    """Blocks of the channels whose address the environment has.

    Raises:
        ConfigurationError: an address is of another kind.
    """
    environment = os.environ if environment is None else environment
    return tuple(
        BlockItem(name=channel.block_name, block=channel.block(address))
        for channel in CHANNELS
        if (address := environment.get(channel.variable))
    )


async def find_block(client: PrefectClient, slug: str, name: str) -> BlockDocument | None:
    """A block with its secrets; None where there is none."""
    try:
        return await client.read_block_document_by_name(name, slug, include_secrets=True)
    except ObjectNotFound:
        return None


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
