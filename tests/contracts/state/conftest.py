"""One S3 service for the tests of shared state; each gets a prefix of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.kernel.location import Location
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


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty location of each kind."""
    if request.param == "file":
        return (tmp_path / "location").as_uri()
    return str(request.getfixturevalue("bucket"))


@pytest.fixture
def location(url: str) -> Location:
    return Location.of(url)


@pytest.fixture
def wrong(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrongStore]:
    """What stands before it, does it wrong, and counts."""
    with wrong_store(s3) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        yield store


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Commands set variables of this process, as of their own."""
    before = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("FALAJ_")}
    yield
    for name in [name for name in os.environ if name.startswith("FALAJ_")]:
        del os.environ[name]
    os.environ.update(before)
