"""Forms of parameters in Prefect's UIs, and what its pages may ask."""

import urllib.request
from typing import Any

import pytest
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from flows.conversion import model_import_flow
from flows.drift_check import drift_check_flow
from flows.feature_refresh import feature_refresh_flow
from flows.pipeline import pipeline_flow
from flows.promotion import approval_flow
from flows.training import training_flow
from tasks.contracts.base import field_title
from tests.support.services.prefect_platform import PrefectApi

pytestmark = pytest.mark.slow

FLOWS: tuple[Flow[..., Any], ...] = (
    approval_flow, drift_check_flow, feature_refresh_flow, model_import_flow, pipeline_flow,
    training_flow,
)  # fmt: skip
BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "enum", "const"}


def definitions(of: Flow[..., Any]) -> dict[str, dict[str, Any]]:
    schema = parameter_schema(of).model_dump()
    return {f"parameters of {of.name}": schema, **schema.get("definitions", {})}


@pytest.mark.parametrize("of", FLOWS, ids=lambda of: of.name)
def test_every_field_of_a_form_is_named_and_explained_and_every_number_has_bounds(
    of: Flow[..., Any],
) -> None:
    """A nested value without a description of its own is explained by its class."""
    known = definitions(of)
    for owner, schema in known.items():
        for name, field in schema.get("properties", {}).items():
            place = f"{owner}.{name}"
            if "const" in field:
                continue
            # Pydantic leaves out a title that the class of the value has too.
            title = field.get("title") or field.get("$ref", "").rpartition("/")[2]
            assert title, f"{place} would be named after its class"
            if not owner.startswith("parameters of"):
                assert title == field_title(name, None), place
            nested = "$ref" in field or "allOf" in field
            assert field.get("description") or nested, f"{place} is not explained"
            if owner.endswith("Config") and field.get("type") in ("number", "integer"):
                assert BOUNDS & field.keys(), f"{place} has no bound"
            # Prefect drops properties of this name when it checks a deployment's parameters.
            assert name != "required", place


@pytest.mark.parametrize("path", ["/", "/v2/", "/api/health"])
def test_pages_may_ask_no_third_party(prefect_api: PrefectApi, path: str) -> None:
    """Prefect's newer UI asks an analytics service though analytics is off."""
    with urllib.request.urlopen(base(prefect_api) + path, timeout=60) as answer:
        policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert f"connect-src 'self' data: blob: {base(prefect_api)};" in policy


def base(api: PrefectApi) -> str:
    return api.url.removesuffix("/api")
