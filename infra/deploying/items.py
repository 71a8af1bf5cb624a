"""What all that is deployed has in common: it is compared, and written where it differs."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import ObjectNotFound
from pydantic import Field, SecretStr

from infra.deploying.file import UseCase
from tasks.control.routing.task import SharedResults

Thing = TypeVar("Thing")
MISSING = "is missing"
LONGEST_VALUE = 60
"""Characters of a value in a difference; the rest is cut."""


@dataclass(frozen=True)
class Found:
    """A thing as the server has it.

    Attributes:
        view: what is compared, as JSON.
        paused: what of it people have paused; a deploy leaves that alone unless asked.
    """

    view: Mapping[str, Any]
    paused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What has to change, and what a person chose on the server; both in words."""

    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Item(ABC):
    """A pool, queue, block, deployment or automation as it should be.

    Attributes:
        resume: what people have paused is switched on again.
    """

    resume: bool = False
    is_secret: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """Kind and name, such as `deployment training/cpu`."""

    @abstractmethod
    async def wanted(self, client: PrefectClient) -> Mapping[str, Any]:
        """What is compared, as JSON."""

    @abstractmethod
    async def found(self, client: PrefectClient) -> Found | None:
        """The same of the server; None where there is none."""

    @abstractmethod
    async def write(self, client: PrefectClient) -> None:
        """Make the server's as this one is; only called where they differ."""

    async def compare(self, client: PrefectClient) -> Comparison:
        """Read the server's and compare; changes nothing."""
        found = await self.found(client)
        if found is None:
            return Comparison((MISSING,))
        faults = list(differences(await self.wanted(client), found.view))
        if self.is_secret:
            faults = sorted({f"{fault.split(' ')[0]} is another one" for fault in faults})
        if self.resume:
            return Comparison((*faults, *found.paused))
        notes = (f"{one}, by a person; --resume switches it on" for one in found.paused)
        return Comparison(tuple(faults), tuple(notes))


@dataclass
class Outcome:
    """What a deploy, or a check, found and did."""

    equal: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, label: str, compared: Comparison) -> None:
        """Take up one comparison."""
        self.differences += [f"{label}: {difference}" for difference in compared.differences]
        self.notes += [f"{label}: {note}" for note in compared.notes]
        if not compared.differences:
            self.equal.append(label)


def differences(wanted: object, found: object, place: str = "") -> Iterator[str]:
    """Where two JSON values differ: the path to each place, and both values there."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key in sorted({*wanted, *found}, key=str):
            inner = f"{place}.{key}" if place else str(key)
            yield from differences(wanted.get(key, MISSING), found.get(key, MISSING), inner)
    elif wanted != found:
        yield f"{place} should be {_shown(wanted)} and is {_shown(found)} on the server"


def _shown(value: Any) -> str:
    text = "missing" if value is MISSING else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


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
        own = self.block._to_block_document(self.name, nowhere, nowhere, include_secrets=True)
        return _plain(own.data)

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
    # Of a block without fields, Prefect keeps a mark of its own.
    return {key: value for key, value in shown.items() if value is not None and key[0] != "_"}


def use_case_block(use_cases: tuple[UseCase, ...]) -> BlockItem:
    """The block that `prefect.yaml` refers to."""
    return BlockItem(name="first", block=UseCaseBlock(value=dict(use_cases[0].config)))


RESULTS = BlockItem(name="state", block=SharedResults())
"""Of no use where the state is in one folder, and harmless."""


async def if_there(asked: Awaitable[Thing]) -> Thing | None:
    """What the server is asked for; None where there is none."""
    try:
        return await asked
    except ObjectNotFound:
        return None


async def find_block(client: PrefectClient, slug: str, name: str) -> BlockDocument | None:
    """A block with its secrets; None where there is none."""
    return await if_there(client.read_block_document_by_name(name, slug, include_secrets=True))
