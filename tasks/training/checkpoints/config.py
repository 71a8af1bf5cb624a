"""Where the checkpoints of a training run go, and how often."""

from __future__ import annotations

import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

# Folders below each other; none of them is `.` or `..`, and neither a query nor a fragment follows.
FOLDERS = r"(?:/(?!\.{1,2}(?:/|$))[^/?#\0]*)*"
LOCAL_URI = re.compile(rf"file://({FOLDERS})")
S3_URI = re.compile(rf"s3://([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9]{FOLDERS})")


class CheckpointConfig(BaseModel):
    """Checkpoints of one training run; how it is carried out, not what it computes."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    uri: str = Field(
        default="",
        max_length=1024,
        description="Folder of the checkpoints of all runs: file:///folder or s3://bucket/prefix; "
        "each run has its own below. Empty: the run directory. Ranks on several hosts need a place "
        "that all of them reach.",
    )
    every_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Seconds between checkpoints within an epoch; there is one after each epoch in "
        "any case. What is lost with all ranks is at most this, and the time of a write.",
    )

    @model_validator(mode="after")
    def _uri_names_a_location(self) -> Self:
        if self.uri and not (self.local_folder or self.bucket_and_prefix):
            # Without the URI: what stands before an @ may be a password.
            raise ValueError(
                "uri is no location for checkpoints; expected file:///folder or "
                "s3://bucket/prefix, without user, query or '..', or nothing"
            )
        return self

    @property
    def local_folder(self) -> str:
        """Absolute folder that `uri` names; empty where it names none."""
        return _path(LOCAL_URI, self.uri)

    @property
    def bucket_and_prefix(self) -> str:
        """`bucket/prefix` that `uri` names; empty where it names none."""
        return _path(S3_URI, self.uri)


def _path(pattern: re.Pattern[str], uri: str) -> str:
    match = pattern.fullmatch(uri)
    return match[1].rstrip("/") if match else ""
