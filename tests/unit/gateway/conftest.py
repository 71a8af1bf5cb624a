"""A prepared edge without an Envoy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.gateway.config import GatewayPlan, read_plan
from tests.support.services.signing import AUDIENCE, Signer

MODELS = {"flight-delay": {}, "acme-churn": {}}
ISSUER = "https://issuer.test"


@pytest.fixture
def describe(tmp_path: Path) -> Callable[..., GatewayPlan]:
    """Write edge.yaml and security.yaml, and read the plan."""

    def described(security: dict[str, Any] | None = None, **edge: Any) -> GatewayPlan:
        (tmp_path / "edge").mkdir(exist_ok=True)
        (tmp_path / "serving").mkdir(exist_ok=True)
        (tmp_path / "serving" / "keys.json").write_text(Signer(ISSUER).keys())
        known = {"issuer": ISSUER, "audience": AUDIENCE, "keys": "keys.json"}
        (tmp_path / "edge" / "edge.yaml").write_text(yaml.safe_dump({"models": MODELS} | edge))
        content = {"issuers": [known]} | (security or {})
        (tmp_path / "serving" / "security.yaml").write_text(yaml.safe_dump(content))
        return read_plan(tmp_path)

    return described
