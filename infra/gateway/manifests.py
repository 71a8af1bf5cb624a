"""The same split on Kubernetes: manifests from values and the shares of one model.

    python -m falaj gateway manifests split|kserve VALUES --candidate 0.1

What Envoy does here and a Gateway does not: stickiness, shares below one percent, mirrored requests
that say so. Where those matter, run this project's gateway in the cluster instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from infra.gateway.config import Shares
from infra.gateway.rendering import TEMPLATES
from serving.interfaces import TRACKS
from tasks.kernel.errors import ConfigurationError

SPLIT, KSERVE = "split.yaml.j2", "kserve.yaml.j2"
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$")]
Host = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
Uri = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+]*://[A-Za-z0-9._/@:-]+$")]
Version = Annotated[str, Field(pattern=r"^[0-9]+$")]


class Values(BaseModel):
    """What a cluster's owner configures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    service: Label = "falaj-serving"
    namespace: Label = "falaj"
    gateway: Label = "public"
    gateway_namespace: Label = "gateways"
    host: Host
    stable_version: Version = "1"
    stable_uri: Uri
    candidate_version: Version | None = None
    candidate_uri: Uri | None = None

    @model_validator(mode="after")
    def _candidate_is_complete(self) -> Self:
        if (self.candidate_version is None) != (self.candidate_uri is None):
            raise ValueError("name both candidate_version and candidate_uri, or none of them")
        return self


def read_values(file: Path) -> Values:
    """The values of a YAML file.

    Raises:
        ConfigurationError: it cannot be read, or is wrong.
    """
    try:
        return Values.model_validate(yaml.safe_load(file.read_text()))
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}") from exc
    except (UnicodeDecodeError, yaml.YAMLError, ValidationError) as exc:
        raise ConfigurationError(f"{file}: {exc}") from exc


def render(template: str, values: Values, shares: Shares) -> str:
    """The manifests as YAML.

    Raises:
        ConfigurationError: a share that the template cannot express, or one without a candidate.
    """
    candidate = _percent("candidate", shares.candidate)
    if template == KSERVE and candidate and values.candidate_version is None:
        raise ConfigurationError(
            f"{values.model} has a share for a candidate, and the values name none; set "
            "candidate_version and candidate_uri"
        )
    # Values are of patterns that YAML cannot misread.
    return TEMPLATES.get_template(template).render(
        values.model_dump(),
        tracks=TRACKS,
        weights=(("candidate", candidate), ("stable", 100 - candidate)),
        candidate_percent=candidate,
        mirror_percent=_percent("mirror", shares.mirror),
    )


def parts(manifests: str) -> list[Mapping[str, Any]]:
    """The documents of rendered manifests."""
    return [document for document in yaml.safe_load_all(manifests) if document]


def _percent(name: str, share: float) -> int:
    percent = round(share * 100)
    if abs(percent - share * 100) > 1e-9:
        raise ConfigurationError(
            f"share {name}={share}: a Gateway and KServe count in whole percent; the gateway of "
            "this project counts in hundredths"
        )
    return percent
