"""Fixtures that all folders share."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from xdist.scheduler import LoadFileScheduling

pytest.register_assert_rewrite("tests.support")

# The first lines' names are fixtures for all folders.
from tests.support.services.openbao import openbao  # noqa: E402, F401
from tests.support.services.prefect_platform import on_prefect, prefect_api  # noqa: E402, F401
from tests.support.suite import examples, resume  # noqa: E402

examples.register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    resume.add_options(parser)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Shares files out among workers; those of the journey stay together, for they share a loop."""

    def _split_scope(self, nodeid: str) -> str:
        journey = "tests/journey/"
        return journey if nodeid.startswith(journey) else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    # A shell has its background jobs ignore Ctrl-C, and so would every process started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resume.install(config)


def pytest_unconfigure() -> None:
    """Close what Feast's own store leaves open: DuckDB lists it as leaked when Python ends."""
    if (ibis := sys.modules.get("ibis")) and ibis.options.default_backend is not None:
        ibis.options.default_backend.disconnect()
        ibis.options.default_backend = None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _priority_is_restored() -> Iterator[None]:
    """A backup in this process gives way to all others; the next test is not to."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    with suppress(PermissionError):  # who is not root stays as low as it went
        os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture(autouse=True)
def _place_is_forgotten() -> Iterator[None]:
    """A command in this process keeps for its children where it works; the next test works anew."""
    before = {name: os.environ.get(name) for name in ("FALAJ_HOME", "FALAJ_FEATURE_REPO")}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})


@pytest.fixture(autouse=True)
def _loggers_speak(caplog: pytest.LogCaptureFixture) -> None:
    """Undo what the logging set-up of a library in an earlier test did to ours, and to caplog."""
    logging.root.setLevel(logging.WARNING)
    caplog.handler.setLevel(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "tasks":
            logger.disabled, logger.propagate = False, True
