"""An S3 service for all tests here, named before Spark starts: its workers inherit that."""

from collections.abc import Iterator

import pytest

from infra.bench.processes import S3_KEY
from tests.support.services.servers import s3_server
from tests.support.state import make_bucket


@pytest.fixture(scope="session", autouse=True)
def lake() -> Iterator[str]:
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEY)
        make_bucket(endpoint, "lake")
        yield "s3://lake/state"
