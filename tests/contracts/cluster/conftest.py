"""An S3 service for all tests here, named before Spark starts: its workers inherit that."""

from collections.abc import Iterator

import pytest

from tests.support.state import s3_of_environment


@pytest.fixture(scope="session", autouse=True)
def lake() -> Iterator[str]:
    with s3_of_environment():
        yield "s3://lake/state"
