"""The notifications of `notifications.yaml`: what people are told, when, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

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
    content = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Notification, ...]).validate_python(yaml.safe_load(content))


def notification(name: str) -> Notification:
    """The one of that name."""
    return next(found for found in notifications() if found.name == name)
