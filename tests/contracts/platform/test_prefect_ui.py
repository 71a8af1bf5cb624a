"""Forms of parameters in both of Prefect's UIs, in a real browser."""

from __future__ import annotations

import base64
import urllib.request
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from flows.config import read_pipeline_config
from flows.conversion import model_import_flow
from flows.drift_check import drift_check_flow
from flows.feature_refresh import feature_refresh_flow
from flows.pipeline import pipeline_flow
from flows.promotion import approval_flow
from flows.training import training_flow
from tasks.contracts.base import field_title
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT
from tests.support.services.browser import Page, browser, needs_browser
from tests.support.services.prefect_platform import PrefectApi

pytestmark = pytest.mark.slow

FLOWS: tuple[Flow[..., Any], ...] = (
    approval_flow, drift_check_flow, feature_refresh_flow, model_import_flow, pipeline_flow,
    training_flow,
)  # fmt: skip


def definitions(of: Flow[..., Any]) -> dict[str, dict[str, Any]]:
    schema = parameter_schema(of).model_dump()
    return {f"parameters of {of.name}": schema, **schema.get("definitions", {})}


@pytest.mark.parametrize("of", FLOWS, ids=lambda of: of.name)
def test_every_field_of_a_form_is_named_and_explained(of: Flow[..., Any]) -> None:
    """A nested value without a description of its own is explained by its class."""
    known = definitions(of)
    for owner, schema in known.items():
        for name, field in schema.get("properties", {}).items():
            place = f"{owner}.{name}"
            if "const" in field:
                continue
            assert field.get("title"), f"{place} would be named after its class"
            if not owner.startswith("parameters of"):
                assert field["title"] == field_title(name, None), place
            nested = "$ref" in field or "allOf" in field
            assert field.get("description") or nested, f"{place} is not explained"
            # Prefect drops properties of this name when it checks a deployment's parameters.
            assert name != "required", place


@pytest.mark.parametrize("of", FLOWS, ids=lambda of: of.name)
def test_numbers_of_a_form_have_bounds(of: Flow[..., Any]) -> None:
    bounds = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "enum", "const"}
    unbounded = [
        f"{owner}.{name}"
        for owner, schema in definitions(of).items()
        if owner.endswith("Config")
        for name, field in schema.get("properties", {}).items()
        if field.get("type") in ("number", "integer") and not bounds & field.keys()
    ]
    assert unbounded == []


@pytest.mark.parametrize("path", ["/", "/v2/", "/api/health"])
def test_pages_may_ask_no_third_party(prefect_api: PrefectApi, path: str) -> None:
    """Prefect's newer UI asks an analytics service though analytics is off."""
    with urllib.request.urlopen(base(prefect_api) + path, timeout=60) as answer:
        policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert f"connect-src 'self' data: blob: {base(prefect_api)};" in policy


@pytest.fixture(scope="module")
def page(prefect_api: PrefectApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A tab that is logged in, as the login page does it."""
    word = base64.b64encode(prefect_api.auth_string.encode()).decode()
    with prefect_api.in_process(), browser(tmp_path_factory.mktemp("browser")) as tab:
        tab.run_before_each_page(f"localStorage.setItem('prefect-password', '{word}')")
        yield tab


@pytest.fixture(scope="module")
def deployment(prefect_api: PrefectApi) -> Iterator[UUID]:
    """The training flow with its use case as the default: a click shows the whole form."""
    config = read_pipeline_config(PROJECT_ROOT / DEFAULT_FEATURE_REPO)
    with prefect_api.in_process(), get_client(sync_client=True) as client:
        made = client.create_deployment(
            client.create_flow(training_flow),
            "form-under-test",
            parameters={"config": config.model_dump(mode="json")},
            parameter_openapi_schema=parameter_schema(training_flow).model_dump(),
            enforce_parameter_schema=True,
        )
        yield made
        client.delete_deployment(made)


def base(api: PrefectApi) -> str:
    return api.url.removesuffix("/api")


@needs_browser
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ui", ["", "/v2"])
def test_the_form_of_a_deployment_shows_names_descriptions_and_choices(
    page: Page, prefect_api: PrefectApi, deployment: UUID, ui: str
) -> None:
    page.open(f"{base(prefect_api)}{ui}/deployments/deployment/{deployment}/run")
    page.wait_for_text(
        "Window that is refreshed and retrieved.",
        "Rows that the model learns from.",
        "Rows that judge the model; later than all it has seen.",
        "Ask a person once all gates are open; the candidate waits for the answer.",
        "Floor of the AUC.",
    )
    words = page.text.splitlines()
    for label in ("Train", "Validation", "Test"):
        assert any(word.startswith(label) for word in words), label
    assert "DataSplits" not in words
    assert "not_worse" in str(page.value("document.documentElement.outerHTML"))
