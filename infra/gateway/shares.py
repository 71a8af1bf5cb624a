"""Shares of traffic by model, kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import write_atomically

PARTS = 10_000
"""Shares are held in steps of a hundredth of a percent."""


class Shares(BaseModel):
    """How a model's traffic is split.

    Attributes:
        candidate: share that the candidate answers; the stable version answers the rest.
        mirror: share of requests that is sent to the shadow too, its answers thrown away.
        sticky: a client always meets the same version; a growing share keeps those it has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    mirror: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    sticky: bool = True


_ALL = TypeAdapter(dict[str, Shares])


def read_shares(file: Path) -> Mapping[str, Shares]:
    """Shares by model; none where nothing was ever set.

    Raises:
        ConfigurationError: the file says nothing any more.
    """
    try:
        return _ALL.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as exc:
        raise ConfigurationError(f"{file} holds no shares: {exc}") from exc


def write_shares(file: Path, shares: Mapping[str, Shares]) -> None:
    """Replace the file."""
    write_atomically(file, _ALL.dump_json(dict(shares), indent=1).decode() + "\n")
