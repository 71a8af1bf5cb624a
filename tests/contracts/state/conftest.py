"""One S3 service for the tests of shared state; each gets a prefix of its own."""

from collections.abc import Iterator

import pytest

from infra.bench.processes import S3_KEY
from tests.support.services.servers import s3_server
from tests.support.state import make_bucket


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Its endpoint; its keys are in the environment of the whole session."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEY)
        patch.setenv("AWS_REGION", "us-east-1")
        make_bucket(endpoint, "lake")
        yield endpoint


@pytest.fixture
def bucket(s3: str, request: pytest.FixtureRequest) -> str:
    """An empty prefix of it."""
    return f"s3://lake/{abs(hash(request.node.nodeid))}"
