"""One Envoy with one small server behind it for all tests of the folder."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.serving.edges import MODEL, Edge, running_edge


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with running_edge(tmp_path_factory.mktemp("edge")) as edge:
        yield edge


@pytest.fixture
def edge(running: Edge) -> Edge:
    """The running edge, all traffic on stable."""
    if running.traffic.shares(MODEL).candidate or running.traffic.shares(MODEL).mirror:
        running.traffic.set_shares(MODEL, 0, 0)
    running.upstream.fail_with = None
    running.upstream.is_held = False
    running.upstream.seen.clear()
    return running


@pytest.fixture(scope="package")
def client(running: Edge) -> httpx.Client:
    return running.client()
