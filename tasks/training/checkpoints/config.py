"""Where the checkpoints of a training run go, and how often."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

BUCKET_PATTERN = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class CheckpointConfig(BaseModel):
    """Checkpoints of one training run; says how it is carried out, not what it computes."""

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
    def _uri_names_a_place(self) -> Self:
        if self.uri and not (self.local_folder or self.bucket_and_prefix):
            raise ValueError(
                f"uri={_without_secrets(self.uri)!r} is no place for checkpoints; expected "
                "file:///folder or s3://bucket/prefix, without user, query or '..', or nothing"
            )
        return self

    @property
    def local_folder(self) -> str:
        """Absolute folder that `uri` names; empty where it names none."""
        parts = urlsplit(self.uri)
        is_local = parts.scheme == "file" and not parts.netloc and _is_plain(parts.path)
        return parts.path if is_local and parts.path != "/" and not _has_more(self.uri) else ""

    @property
    def bucket_and_prefix(self) -> str:
        """`bucket/prefix` that `uri` names; empty where it names none."""
        parts = urlsplit(self.uri)
        is_bucket = parts.scheme == "s3" and BUCKET_PATTERN.fullmatch(parts.netloc)
        if not is_bucket or not _is_plain(parts.path) or _has_more(self.uri):
            return ""
        return f"{parts.netloc}{parts.path}".rstrip("/")


def _is_plain(path: str) -> bool:
    return not any(part in {".", ".."} for part in path.split("/")) and "\0" not in path


def _has_more(uri: str) -> bool:
    parts = urlsplit(uri)
    return bool(parts.query or parts.fragment)


def _without_secrets(uri: str) -> str:
    """The URI as it may be shown: what stands before an @ may be a password."""
    scheme, separator, rest = uri.rpartition("@")
    return f"{scheme.partition('://')[0]}://...@{rest}" if separator else uri
