"""What is different where the work pools are Kubernetes': an image, and no leases of devices."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.deploying.use_cases import UseCase
from tasks.kernel.errors import ConfigurationError

IMAGE_VARIABLE = "FALAJ_IMAGE"
_IMAGE = re.compile(
    r"[a-z0-9][a-z0-9._/-]*(:[0-9]+/[a-z0-9._/-]+)?"  # a registry may have a port
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


def read_image(environment: Mapping[str, str] | None = None) -> str:
    """The image that runs are started from: this project, installed, with its requirements.

    Raises:
        ConfigurationError: it is not named, is no name of an image, or names whatever is newest.
            Without one Prefect takes an image of its own, in which no flow of this project is.
    """
    environment = os.environ if environment is None else environment
    image = environment.get(IMAGE_VARIABLE, "")
    example = "such as registry.example.org/falaj:1.4 or registry.example.org/falaj@sha256:..."
    if not image:
        raise ConfigurationError(
            f"variable {IMAGE_VARIABLE} is not set; pods need an image with this project in it, "
            f"{example} Export it and deploy again. Nothing was deployed"
        )
    found = _IMAGE.fullmatch(image)
    if found is None:
        raise ConfigurationError(
            f"{IMAGE_VARIABLE}={image!r} is no name of an image; expected {example} Nothing was "
            "deployed"
        )
    if found[2] in (None, ":latest") and not found[3]:
        raise ConfigurationError(
            f"{IMAGE_VARIABLE}={image!r} is whatever is newest, so two runs could be of two "
            f"releases; expected a tag or a digest, {example} Nothing was deployed"
        )
    return image


def with_image(template: Mapping[str, Any], image: str) -> dict[str, Any]:
    """A base job template whose runs are started from this image, unless they name another."""
    filled: dict[str, Any] = copy.deepcopy(dict(template))
    filled["variables"]["properties"]["image"]["default"] = image
    return filled


def without_leases(use_case: UseCase) -> UseCase:
    """The use case where Kubernetes gives each pod its devices: nobody else has them."""
    lease = {**use_case.config["lease"], "enabled": False}
    return replace(use_case, config={**use_case.config, "lease": lease})
