"""One S3 service for the tests of shared state; each gets a prefix of its own."""

from collections.abc import Iterator

import pytest

from tests.support.host.wrong_store import WrongStore, wrong_store
from tests.support.state import s3_of_environment


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Its endpoint; its keys are in the environment of the whole session."""
    with s3_of_environment() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3: str, request: pytest.FixtureRequest) -> str:
    """An empty prefix of it."""
    return f"s3://lake/{abs(hash(request.node.nodeid))}"


@pytest.fixture
def wrong(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrongStore]:
    """What stands before it, does it wrong, and counts."""
    with wrong_store(s3) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        yield store
