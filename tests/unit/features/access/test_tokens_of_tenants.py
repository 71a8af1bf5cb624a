"""A feature server of a tenant: the issuer's tokens are good, and not all are for it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from feast import FeatureStore
from feast.permissions.auth.token_parser import TokenParser
from feast.permissions.user import User
from starlette.authentication import AuthenticationError

from tasks.features.access.server import AuditedTokenParser
from tasks.governance.journal import Journal
from tasks.kernel.tenants import Tenant, put_tenant
from tests.support.services.sign_in import write_sign_in
from tests.support.services.signing import Signer


class Accepting(TokenParser):
    """Every token is good."""

    async def user_details_from_access_token(self, access_token: str) -> User:
        return User(username="somebody", roles=["reader"])


@pytest.mark.parametrize("claim", ["tenant", "org"])
def test_a_token_of_another_tenant_opens_no_features(tmp_path: Path, claim: str) -> None:
    home, signer = put_tenant(tmp_path, "red", Tenant()), Signer("https://issuer.test")
    if claim == "org":
        write_sign_in(tmp_path, signer.issuer, tenant_claim="org")
    store = cast(FeatureStore, SimpleNamespace(project="flights"))

    def read(folder: Path, **claims: Any) -> str:
        parser = AuditedTokenParser(Accepting(), Journal(folder / "audit"), store)
        token = signer.token("reader", **claims)
        return str(asyncio.run(parser.user_details_from_access_token(token)).username)

    assert read(home, **{claim: "red"}) == read(tmp_path) == "somebody"
    for claims in ({claim: "blue"}, {}, {claim: ""}, {claim: ["red"]}):
        with pytest.raises(AuthenticationError):
            read(home, **claims)
    refused = [line.content for line in Journal(home / "audit").lines()][1:]
    assert {line["outcome"] for line in refused} == {"token refused"}
