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
    async def user_details_from_access_token(self, access_token: str) -> User:
        return User(username="somebody", roles=["reader"])


def test_a_token_of_another_tenant_opens_no_features(tmp_path: Path) -> None:
    home, signer = put_tenant(tmp_path, "red", Tenant()), Signer("https://issuer.test")
    write_sign_in(tmp_path, signer.issuer, tenant_claim="org")
    store = cast(FeatureStore, SimpleNamespace(project="flights"))

    def read(folder: Path, **claims: Any) -> User:
        parser = AuditedTokenParser(Accepting(), Journal(folder / "audit"), store)
        return asyncio.run(parser.user_details_from_access_token(signer.token(**claims)))

    assert read(home, org="red").username == read(tmp_path).username == "somebody"
    for org in ("blue", None, "", ["red"]):
        with pytest.raises(AuthenticationError):
            read(home, org=org, tenant="red")
